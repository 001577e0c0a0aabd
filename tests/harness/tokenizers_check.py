#!/usr/bin/env python3
"""Ids and texts of tokenizer.json files beside the `tokenizers` package (PyPI), on about 10 MB of mixed text: books, WikiText, the machine's documentation and
programs, characters of all Unicode. The tokenizers are trained here, with the patterns, normalizers and decoders of published models.

  tokenizers_check.py BLOCKS SHARED [--speed]     BLOCKS: build/tests/tokenizer_blocks; SHARED: the folder with data/

Exits 77 (skipped, says why) where the package or the data are not there, 1 at the first difference. --speed says MB a second of processor time of both, one thread each.
"""

import glob
import gzip
import io
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
try:
    import tokenizers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError as error:
    skip(f"{error}; pip install tokenizers")

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>"]


def known_characters():
    """Those of this Python's Unicode whose normal forms are the same in the package, which has tables of several versions, and whose category is what it was in
    Unicode 8, of which its categories are."""
    forms = [(getattr(normalizers, form)(), form) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    changed = "\u166d\u1734\u1885\u1886\u1cf2\u1cf3\ua9bd\U000111c9"

    def same(c):
        return c not in changed and all(ours.normalize_str(c) == unicodedata.normalize(form, c) for ours, form in forms)

    characters = [chr(c) for c in range(1, 0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    known = [c for c in characters if same(c)]
    print(f"characters: {len(known)} of Unicode {unicodedata.unidata_version}; {len(characters) - len(known)} are left out, which the package takes for something else")
    return known


def generated(seed, count, known):
    """Characters of all Unicode, and what breaks tokenizers: spaces of all kinds, contractions, marks, special tokens."""
    draw = random.Random(seed)
    parts = [" ", "  ", "\n", "\r\n", "\t", " \n ", "'s", "'LL", "'\u017f", "123", "\u00a0", "\u3000", "\u2581", "<|endoftext|>", " <mask> ", "<0x0A>", "\u200d", "\x0b", "\x85"]
    words = ["hello", " world", "日本語", "한국어", "e\u0301", "\ufb01", "Ünïcödé", "\U0001d11e", "\U0001f469\u200d\U0001f467", "नमस्ते", "straße", "İ", "Σίσυφος"]
    pools = [known, known[:600], parts, words]
    return "".join(draw.choice(draw.choices(pools, (30, 30, 20, 20))[0]) for _ in range(count))


def blocks(shared):
    texts = [(shared / "data" / name).read_text() for name in ("tinyshakespeare.txt", "wikitext2_test.txt", "wikitext2_valid.txt")]
    size = 0
    for path in sorted(glob.glob("/usr/share/doc/*/*")) + sorted(glob.glob("/usr/share/perl/5*/**/*.p?", recursive=True)) + sorted(glob.glob("/usr/lib/python3*/**/*.py", recursive=True)):
        if size > 5_000_000:
            break
        try:
            raw = pathlib.Path(path).read_bytes()
            text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode()
        except (OSError, UnicodeDecodeError, EOFError):
            continue
        if "\0" not in text:
            texts.append(text)
            size += len(text)
    known = known_characters()
    return texts + ["", " ", "\n", "a"] + [generated(seed, 60, known) for seed in range(300)] + [generated(1000, 400_000, known)]


def bpe(pre, vocab=6000, normalizer=None, decoder=None, special=True, alphabet=True, **model):
    t = Tokenizer(models.BPE(**model))
    if normalizer:
        t.normalizer = normalizer
    if pre:
        t.pre_tokenizer = pre
    t.decoder = decoder or decoders.ByteLevel()
    start = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    more = [f"<0x{b:02X}>" for b in range(256)] if model.get("byte_fallback") else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False, initial_alphabet=start, special_tokens=(["<unk>"] if model.get("unk_token") else []) + more + (SPECIAL if special else []), limit_alphabet=1000
    )
    return t, trainer


def byte_level(*patterns, digits=False):
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])


def sentencepiece_table():
    """The table of the rule nmt_nfkc (T5, XLM-R, ...), out of a model that the sentencepiece package trains; None without the package."""
    try:
        import sentencepiece
    except ImportError:
        return None
    model = io.BytesIO()
    words = [" ".join(random.Random(i).choices(["one", "two", "three", "four"], k=9)) for i in range(200)]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=model, vocab_size=40, hard_vocab_limit=False, normalization_rule_name="nmt_nfkc", minloglevel=3)
    return field(field(model.getvalue(), 3), 2)  # normalizer_spec.precompiled_charsmap


def field(message, number):
    """The bytes of a field of a protobuf message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        size = varint() if kind in (0, 2) else {1: 8, 5: 4}[kind]
        if kind == 0:
            continue
        if key >> 3 == number:
            return message[at : at + size]
        at += size
    raise ValueError(f"no field {number}")


def tokenizers_of_models():
    """name -> (tokenizer, its trainer, whether its texts come back)."""
    yield "gpt2", *bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)), True
    yield "roberta", *bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)), False
    yield "llama3", *bpe(byte_level(LLAMA3)), True
    yield "qwen2", *bpe(byte_level(QWEN2), normalizer=normalizers.NFC()), False
    yield "gpt4o", *bpe(byte_level(GPT4O)), True
    yield "deepseek3", *bpe(byte_level(*DEEPSEEK)), True
    yield "starcoder", *bpe(byte_level(digits=True)), True
    llama = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fused = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    yield "llama2", *bpe(None, 3000, llama, fused, special=False, alphabet=False, unk_token="<unk>", fuse_unk=True, byte_fallback=True), False
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    yield "mistral", *bpe(first, 3000, None, decoders.Metaspace(prepend_scheme="first"), alphabet=False, unk_token="<unk>", byte_fallback=False, fuse_unk=False), False
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Metaspace()
    yield "unigram", t, trainers.UnigramTrainer(vocab_size=4000, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"), False
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Strip()])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.Metaspace(prepend_scheme="always")])
    t.decoder = decoders.Metaspace()
    yield "unigram_words", t, trainers.UnigramTrainer(vocab_size=12000, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"), False
    t, trainer = bpe(pre_tokenizers.Whitespace(), 3000, normalizers.Lowercase(), decoders.BPEDecoder("</w>"), special=False, alphabet=False, unk_token="<unk>", end_of_word_suffix="</w>")
    trainer.end_of_word_suffix = "</w>"
    yield "openai_gpt", t, trainer, False
    for name, lowercase in (("bert", True), ("bert_cased", False)):
        t = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=40))
        t.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece()
        yield name, t, trainers.WordPieceTrainer(vocab_size=5000, show_progress=False, special_tokens=["[UNK]", "[SEP]"]), False
    t = Tokenizer(models.WordLevel(unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    t.decoder = decoders.WordPiece(cleanup=False)
    yield "words", t, trainers.WordLevelTrainer(vocab_size=5000, show_progress=False, special_tokens=["<unk>"]), False
    table = sentencepiece_table()
    if table is None:
        print("xlm_roberta: left out, its table is made by sentencepiece (pip install sentencepiece)")
        return
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.Precompiled(table), normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Metaspace()
    yield "xlm_roberta", t, trainers.UnigramTrainer(vocab_size=4000, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"), False


def main():
    program, shared = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    speed, only = "--speed" in sys.argv, [a[len("--only=") :] for a in sys.argv if a.startswith("--only=")]
    if not (shared / "data").is_dir():
        skip(f"{shared}/data is not there")
    texts = blocks(shared)
    size = sum(len(text.encode()) for text in texts)
    sample = [text[at : at + 4000] for text in texts if len(text) > 8000 for at in range(0, min(len(text), 200_000), 40_000)]
    print(f"tokenizers {tokenizers.__version__}, {size / 1e6:.1f} MB in {len(texts)} texts")
    with tempfile.TemporaryDirectory() as folder:
        source, ids_file, back_file = (os.path.join(folder, name) for name in ("texts", "ids", "back"))
        pathlib.Path(source).write_bytes("\0".join(texts).encode())
        for name, tokenizer, trainer, lossless in tokenizers_of_models():
            if only and name not in only:
                continue
            tokenizer.train_from_iterator(sample, trainer)
            tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False, special=True), AddedToken("Sisyphus", single_word=True, normalized=True)])
            # Around a text the package puts what this says; add_special_tokens=False leaves it out.
            tokenizer.post_processor = processors.TemplateProcessing("<mask> $A", special_tokens=[("<mask>", tokenizer.token_to_id("<mask>"))])
            path = os.path.join(folder, "tokenizer.json")
            tokenizer.save(path)
            out = subprocess.run([program, path, source, ids_file, back_file], check=True, capture_output=True, text=True).stdout.strip()
            ours = pathlib.Path(ids_file).read_bytes()
            backs = pathlib.Path(back_file).read_bytes().split(b"\0")
            at, tokens, seconds = 0, 0, 0.0
            for index, text in enumerate(texts):
                begin = time.process_time()
                expected = tokenizer.encode(text, add_special_tokens=False).ids
                seconds += time.process_time() - begin
                (count,) = struct.unpack_from("<q", ours, at)
                got = list(struct.unpack_from(f"<{count}i", ours, at + 8))
                at += 8 + 4 * count
                tokens += count
                if got != expected:
                    place = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
                    show = lambda ids: [tokenizer.id_to_token(i) for i in ids[max(place - 3, 0) : place + 5]]
                    print(f"{name}: text {index}, token {place}: got {show(got)}, expected {show(expected)}; {len(got)} and {len(expected)} tokens")
                    return 1
                back = backs[index].decode(errors="replace")
                if back != tokenizer.decode(expected, skip_special_tokens=False):
                    print(f"{name}: text {index}: decoded to other text")
                    return 1
                if lossless and back != text and "<mask>" not in text:  # which takes the space before it
                    print(f"{name}: text {index} does not come back")
                    return 1
            took = f"; {out}, the package {size / 1e6 / seconds:.1f} MB/s" if speed else ""
            print(f"{name}: {tokens} tokens, vocabulary {tokenizer.get_vocab_size()}: the same ids and texts{took}", flush=True)
    return 0


sys.exit(main())
