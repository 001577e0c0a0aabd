"""A rule that no paper has, in one line, trained on associative recall: read pairs (key, value), then answer a key.

    python examples/python/compose_a_rule.py     # seconds on a CPU
"""

import torch
import torch.nn.functional as F
from fastweight.torch import forward

RULE = "kda gain=longhorn"  # KDA's decay per channel with Longhorn's implicit step
PAIRS, WORDS, DIM = 4, 8, 32

torch.manual_seed(0)
table = torch.nn.Embedding(2 * WORDS, DIM)  # keys, then values
project = torch.nn.Linear(DIM, 4 * DIM + 1)
head = torch.nn.Linear(DIM, WORDS)
parameters = [*table.parameters(), *project.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)


def batch(size=64):
    """ids [size, PAIRS, 2] of pairs, the key [size] that is asked for, and its value [size]."""
    keys = torch.rand(size, WORDS).argsort(1)[:, :PAIRS]
    values = torch.randint(WORDS, (size, PAIRS))
    asked = torch.randint(PAIRS, (size, 1))
    return keys, values, keys.gather(1, asked), values.gather(1, asked)[:, 0]


for step in range(151):
    keys, values, asked, answer = batch()
    pairs = table(keys) + table(values + WORDS)  # one token is a key with its value; the last token is the question
    x = torch.cat([pairs, table(asked)], 1)
    q, k, v, g, beta = project(x)[:, :, None].split([DIM, DIM, DIM, DIM, 1], -1)  # one head
    o = forward(RULE, q, k, v, g=F.logsigmoid(g + 4), beta=beta[..., 0].sigmoid()).o
    logits = head(o[:, -1, 0])
    loss = F.cross_entropy(logits, answer)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0:
        first = loss.item()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}, correct {(logits.argmax(1) == answer).float().mean():.2f}")
print(f"learned: {loss.item() < 0.8 * first}")
