"""A small model of two layers of fastweight.torch.nn learns to repeat a sequence, then repeats one from its state alone.

    python examples/python/train_layers.py     # seconds on a CPU
"""

import torch
import torch.nn.functional as F
from fastweight.torch.nn import GatedDeltaNet

WORDS, LENGTH, WIDTH = 16, 6, 64

torch.manual_seed(0)
embed, head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
layers = torch.nn.ModuleList([GatedDeltaNet(WIDTH, num_heads=2) for _ in range(2)])
norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH) for _ in range(2)])
model = torch.nn.ModuleList([embed, head, layers, norms])
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step in range(121):
    words = torch.randint(WORDS, (32, LENGTH))
    ids = torch.cat([words, words], 1)
    x = embed(ids)
    for norm, layer in zip(norms, layers):
        x = x + layer(norm(x))
    logits = head(x[:, LENGTH:-1])  # the word after each word of the repetition
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, LENGTH + 1 :].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.3f}, correct {(logits.argmax(-1) == ids[:, LENGTH + 1 :]).float().mean():.2f}")

with torch.no_grad():
    words = torch.randint(WORDS, (1, LENGTH))
    states = [layer.new_state(1) for layer in layers]
    guess, repeated = None, []
    for i in range(2 * LENGTH - 1):  # the words, the first of them again, then what the model said
        x = embed(words[:, i % LENGTH] if i <= LENGTH else guess)
        for norm, layer, state in zip(norms, layers, states):
            x = x + layer.step(norm(x), state)
        guess = head(x).argmax(-1)
        if i >= LENGTH:
            repeated.append(guess.item())
print(f"repeated from the state: {repeated == words[0, 1:].tolist()}")
