#!/usr/bin/env python3
"""Random regular expressions and random tokenizer.json files beside the `tokenizers` package (PyPI): ids and decoded texts must be the same, or this project
must refuse the file or the text.

  tokenizers_fuzz.py LINES [COUNT] [SEED] [--show]     LINES: build/tests/tokenizer_lines; COUNT cases (1500), half of them patterns; --show: what was refused

Exits 77 (skipped, says why) where the package is not there, 1 at the first difference, which it prints as a case that can be run again.
"""

import collections
import json
import os
import random
import subprocess
import sys
import warnings


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
try:
    import tokenizers
    from tokenizers import AddedToken, Tokenizer, models
except ImportError as error:
    skip(f"{error}; pip install tokenizers")

ALPHABET = ["a", "b", "c", "A", "B", "0", "1", " ", " ", "\n", ".", ",", "-", "+", "_", "é", "e\u0301", "ß", "中", "\u2581", "\t", "'s", "\r\n", "\u00a0", "\u200d", "²", "\U0001f469", "ſ", "İ", "\0", "\u0001", "\ufffd"]
WORDS = ["ab", "aab", "abc", " a", "  ", "<s>", "bb", "ba", "A", "##a", "a b", "\u2581a"]


# ---- Patterns in Oniguruma's syntax


class Patterns:
    def __init__(self, draw):
        self.draw = draw
        self.groups = 0

    def pattern(self):
        self.groups = 0
        head = self.draw.choice([""] * 9 + ["(?i)", "(?m)", "(?x)", "(?i-m)", "(?W)", "(?S)", "(?D)", "(?P)", "(?y{g})"])
        return head + self.alternatives(3)

    def alternatives(self, depth):
        return "|".join(self.sequence(depth) for _ in range(self.draw.choice((1, 1, 1, 2, 3))))

    def sequence(self, depth):
        return "".join(self.atom(depth) + self.repeat() for _ in range(self.draw.choice((1, 1, 2, 3))))

    def repeat(self):
        if self.draw.random() < 0.55:
            return ""
        low, high = self.draw.randint(0, 2), self.draw.randint(1, 4)
        kind = self.draw.choice(["*", "+", "?", "*?", "+?", "??", "*+", "++", "?+", f"{{{low}}}", f"{{{low},}}", f"{{,{high}}}", f"{{{low},{low + high}}}", f"{{{low},{low + high}}}?", f"{{{low},{low + high}}}+", f"{{{low}}}+", f"{{{low},}}+", f"{{{high},{low}}}", "{", "{a}", "{,}"])
        return kind

    def atom(self, depth):
        draw = self.draw
        kind = draw.random()
        if kind < 0.25:
            return draw.choice(["a", "b", "ab", "A", "0", " ", "é", "中", "-", "_", "\\.", "ß", "ss", "ſ", "\u2581", "#", "e\u0301"])
        if kind < 0.45:
            return draw.choice(r"\w \W \d \D \s \S \h \H \O \N \R \X . \w \s \d \v \t \n \e \x61 \x{e9} \u00e9 \060 \cA \M-a \y \Y \o{141}".split(" "))
        if kind < 0.55:
            return self.property()
        if kind < 0.67:
            return draw.choice(r"^ $ \A \z \Z \b \B \G \b \K \< \> \` \'".split(" "))
        if kind < 0.8:
            return self.set(2)
        if depth == 0:
            return "a"
        inside = self.alternatives(depth - 1)
        kind = draw.choice(["(?:", "(?:", "(", "(?i:", "(?m:", "(?x:", "(?mi-x:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?~", "(?<n>", "(?W:", "(?y{w}:", "(?I:", "(?#", "backward", "call", "if"])
        if kind == "backward":
            return f"({inside})" + draw.choice(["\\1", "\\k<1>", "\\k<-1>", "\\1?"])
        if kind == "call":
            return f"(?<m>{inside})" + draw.choice(["\\g<m>", "\\k<m>", "(?:\\g<m>)?"])
        if kind == "if":
            return draw.choice([f"({inside})?(?(1)a|b)", f"(?({self.set(1)})a|b)", "(?(a)a|\\n)"])
        return kind + inside + ")"

    def property(self):
        name = self.draw.choice(
            "L Lu Ll Lt Lm Lo N Nd Nl No P Pc Pd Po S Sm So Sc Z Zs C Cc M Mn Mc Alnum Alpha Punct Space Word Upper Lower XDigit Graph Print Blank Cntrl Digit ASCII Any Han Latin Greek Cyrillic Hiragana Katakana Letter Emoji Alphabetic White_Space Assigned l lu InBasicLatin In_Latin_1_Supplement Extended_Pictographic Xyz ^L ^N".split(" ")
        )
        return self.draw.choice(["\\p", "\\p", "\\P"]) + "{" + name + "}"

    def set(self, depth):
        draw = self.draw
        parts = [self.set_part(depth) for _ in range(draw.choice((1, 2, 2, 3)))]
        inside = "".join(parts)
        if depth > 0 and draw.random() < 0.25:
            inside += "&&" + draw.choice([self.set(depth - 1), self.set_part(0), "^a"])
        return "[" + draw.choice(["", "", "^"]) + inside + "]"

    def set_part(self, depth):
        draw = self.draw
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(["a", "b", "é", "中", " ", "0", "-", "_", ".", "\\-", "\\]", "\\n", "\\x61", "ſ", "^", "\\b"])
        if kind < 0.55:
            return draw.choice(["a-c", "A-Z", "0-9", "é-ü", "一-龥", "\\x00-\\x20", "a-", "\\x{80}-\\x{10ffff}"])
        if kind < 0.7:
            return draw.choice(r"\w \W \d \s \S \h \H \D \R \X".split(" ")) if draw.random() < 0.9 else "\\O"
        if kind < 0.8:
            return self.property()
        if kind < 0.92 or depth == 0:
            names = "alnum alpha ascii blank cntrl digit graph lower print punct space upper xdigit word".split(" ")
            return "[:" + draw.choice(["", "", "^"]) + draw.choice(names) + ":]"
        return self.set(depth - 1)


# ---- Whole files


class Files:
    def __init__(self, draw):
        self.draw = draw
        self.patterns = Patterns(draw)

    def flag(self, likely=0.5):
        return self.draw.random() < likely

    def text(self, most=14):
        parts = ALPHABET + WORDS
        return "".join(self.draw.choice(parts) for _ in range(self.draw.randint(0, most)))

    def word(self, most=3):
        return "".join(self.draw.choice(ALPHABET) for _ in range(self.draw.randint(1, most)))

    def pattern(self):
        if self.flag(0.4):
            return {"String": self.word(2)}
        return {"Regex": self.patterns.pattern()}

    def sequence(self, one, key, most=3):
        count = self.draw.choice([0, 1, 1, 1] + list(range(2, most + 1)))
        if count == 0:
            return None
        return one() if count == 1 else {"type": "Sequence", key: [one() for _ in range(count)]}

    def normalizer(self):
        kind = self.draw.choice(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Strip", "Replace", "Replace", "Prepend", "BertNormalizer", "ByteLevel"])
        part = {"type": kind}
        if kind == "Strip":
            part.update(strip_left=self.flag(), strip_right=self.flag())
        if kind == "Replace":
            part.update(pattern=self.pattern(), content=self.draw.choice(["", " ", "\u2581", "a", "bb", "x"]))
        if kind == "Prepend":
            part["prepend"] = self.draw.choice(["\u2581", " ", "ab"])
        if kind == "BertNormalizer":
            part.update(clean_text=self.flag(), handle_chinese_chars=self.flag(), strip_accents=self.draw.choice([None, True, False]), lowercase=self.flag())
        return part

    def behavior(self):
        return self.draw.choice(["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"])

    def pre_tokenizer(self):
        kind = self.draw.choice(["ByteLevel", "Split", "Split", "Split", "Metaspace", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"])
        part = {"type": kind}
        if kind == "ByteLevel":
            part.update(add_prefix_space=self.flag(), trim_offsets=True, use_regex=self.flag())
        if kind == "Split":
            part.update(pattern=self.pattern(), behavior=self.behavior(), invert=self.flag(0.3))
        if kind == "Metaspace":
            part.update(replacement=self.draw.choice(["\u2581", "\u2581", "_"]), prepend_scheme=self.draw.choice(["always", "first", "never"]), split=self.flag())
        if kind == "Digits":
            part["individual_digits"] = self.flag()
        if kind == "Punctuation":
            part["behavior"] = self.behavior()
        if kind == "CharDelimiterSplit":
            part["delimiter"] = self.draw.choice(["a", " ", "-", "é"])
        return part

    def decoder(self):
        kind = self.draw.choice(["ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "BPEDecoder", "WordPiece"])
        part = {"type": kind}
        if kind == "Metaspace":
            part.update(replacement="\u2581", prepend_scheme=self.draw.choice(["always", "first", "never"]), split=True)
        if kind == "Replace":
            part.update(pattern=self.pattern(), content=self.draw.choice(["", " ", "a", "bb"]))
        if kind == "Strip":
            part.update(content=self.draw.choice([" ", "a"]), start=self.draw.randint(0, 2), stop=0)
        if kind == "BPEDecoder":
            part["suffix"] = self.draw.choice(["</w>", "a"])
        if kind == "WordPiece":
            part.update(prefix=self.draw.choice(["##", "a"]), cleanup=self.flag())
        return part

    def vocabulary(self, more=()):
        words = [w for w in ALPHABET if self.flag(0.85)] + [self.word() for _ in range(12)] + list(more)
        words = list(dict.fromkeys(words))
        self.draw.shuffle(words)
        return words

    def model(self):
        kind = self.draw.choice(["BPE", "BPE", "Unigram", "WordPiece", "WordLevel"])
        bytes_ = [f"<0x{b:02X}>" for b in range(256) if self.flag(0.98)] if self.flag(0.4) else []
        if kind == "BPE":
            prefix = self.draw.choice([None, None, None, "##"])
            suffix = self.draw.choice([None, None, None, "</w>"])
            single = [c for w in ALPHABET for c in w] + list("ĠĊÃ©¸ŃâĸģäŁ") + list("abc")
            words = list(dict.fromkeys(w for w in single if self.flag(0.9)))
            words += [(prefix or "") + w for w in words] + [w + (suffix or "") for w in words]
            merges = []
            words = list(dict.fromkeys(words))
            for _ in range(14):
                left, right = self.draw.choice(words), self.draw.choice(words)
                if right.startswith(prefix or ""):
                    merges.append([left, right])
                    words.append(left + right[len(prefix or "") :])
            vocab = {w: i for i, w in enumerate(dict.fromkeys(words + bytes_ + ["<unk>"]))}
            return {
                "type": "BPE", "dropout": None, "unk_token": self.draw.choice([None, "<unk>"]), "continuing_subword_prefix": prefix, "end_of_word_suffix": suffix,
                "fuse_unk": self.flag(), "byte_fallback": bool(bytes_) and self.flag(0.8), "ignore_merges": self.flag(0.3), "vocab": vocab, "merges": merges,
            }  # fmt: skip
        if kind == "Unigram":
            words = ["<unk>"] + [w for w in self.vocabulary(bytes_) if w != "<unk>"]
            return {"type": "Unigram", "unk_id": 0, "vocab": [[w, self.draw.choice([-1.0, -2.0, -2.5, -4.0])] for w in words], "byte_fallback": bool(bytes_)}
        if kind == "WordPiece":
            words = self.vocabulary(["##" + self.word() for _ in range(16)] + ["##" + w for w in ALPHABET[:16]] + ["[UNK]"])
            return {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": self.draw.choice(["##", "##", "", "a"]), "max_input_chars_per_word": self.draw.choice([100, 5]), "vocab": {w: i for i, w in enumerate(words)}}
        words = self.vocabulary(["<unk>"] + WORDS)
        return {"type": "WordLevel", "unk_token": "<unk>", "vocab": {w: i for i, w in enumerate(words)}}

    def file(self):
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": self.sequence(self.normalizer, "normalizers"), "pre_tokenizer": self.sequence(self.pre_tokenizer, "pretokenizers"),
            "post_processor": None, "decoder": self.sequence(self.decoder, "decoders"), "model": self.model(),
        }  # fmt: skip

    def added(self):
        return [
            AddedToken(self.draw.choice([self.word(), self.draw.choice(WORDS), "<s>", " "]), single_word=self.flag(0.2), lstrip=self.flag(0.3), rstrip=self.flag(0.3), normalized=self.flag(0.4), special=self.flag(0.3))
            for _ in range(self.draw.choice([0, 0, 1, 2, 3]))
        ]

    def pattern_file(self):
        """Cuts with one pattern; bytes are the tokens, and whole pieces by ignore_merges where they are short words of the alphabet."""
        split = {"type": "Split", "pattern": {"Regex": self.patterns.pattern()}, "behavior": self.behavior(), "invert": self.flag(0.2)}
        mark = {"type": "Metaspace", "replacement": "|", "prepend_scheme": "always", "split": False}
        chars = dict.fromkeys("".join(ALPHABET + WORDS) + "|")
        vocab = {w: i for i, w in enumerate(chars)}
        part = self.file()
        part.update(normalizer=None, decoder=None, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, mark]})
        part["model"] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}
        return part


def package_of(case, added):
    """The tokenizer and its file's text, as the package itself writes it; None where it refuses."""
    try:
        tokenizer = Tokenizer.from_str(json.dumps(case))
        if added:
            tokenizer.add_tokens(added)
        text = tokenizer.to_str()
        return Tokenizer.from_str(text), text
    except BaseException as error:  # a panic is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None, str(error)


def encoded(tokenizer, text):
    try:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return ids, tokenizer.decode(ids, skip_special_tokens=False)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return None, str(error)


def ambiguous(tokenizer, text):
    """Whether two added tokens are looked for as the same text: which of them the package takes is chance."""
    file = json.loads(text)
    seen = set()
    for token in file["added_tokens"]:
        name = token["content"]
        if token["normalized"] and tokenizer.normalizer is not None:
            name = tokenizer.normalizer.normalize_str(name)
        if (name, token["normalized"]) in seen or not name:
            return True
        seen.add((name, token["normalized"]))
    return False


def main():
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    program = arguments[0]
    count = int(arguments[1]) if len(arguments) > 1 else 1500
    seed = int(arguments[2]) if len(arguments) > 2 else 1
    warnings.simplefilter("ignore")
    # Panics of the package are printed by its runtime.
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    ours = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", stderr=errors)
    counts, reasons = collections.Counter(), collections.Counter()
    for index in range(count):
        draw = random.Random(seed * 1_000_003 + index)
        files = Files(draw)
        case = files.pattern_file() if index % 2 == 0 else files.file()
        tokenizer, text = package_of(case, files.added() if index % 2 else [])
        if tokenizer is None:
            counts["files that the package refuses"] += 1
            continue
        if ambiguous(tokenizer, text):
            counts["files of which the package makes one thing or another"] += 1
            continue
        texts = [files.text() for _ in range(8)]
        ours.stdin.write(json.dumps({"tokenizer": text, "texts": texts}) + "\n")
        ours.stdin.flush()
        line = ours.stdout.readline()
        if not line:
            print(f"case {index} of seed {seed}: the program ended with {ours.wait()}\n{text}\n{texts}")
            return 1
        answer = json.loads(line)
        if "refused" in answer:
            counts["files refused here"] += 1
            reasons[answer["refused"][:150]] += 1
            continue
        counts["files"] += 1
        for sample, got in zip(texts, answer["texts"]):
            ids, back = encoded(tokenizer, sample)
            if ids is None:
                counts["texts that the package refuses"] += 1
                continue
            if "error" in got:
                counts["texts refused here"] += 1
                reasons[got["error"][:150]] += 1
                continue
            counts["texts"] += 1
            ours_back = bytes.fromhex(got["back"]).decode(errors="replace")
            if got["ids"] != ids or (ours_back != back and "\ufffd" not in back):
                print(f"case {index} of seed {seed}, text {sample!r}:\n got {got['ids']}\n expected {ids}\n got text {ours_back!r}\n expected {back!r}")
                file = json.loads(text)
                names = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
                print(f" got {[names.get(i) for i in got['ids']]}\n expected {[names.get(i) for i in ids]}")
                print(json.dumps({k: v for k, v in file.items() if k != "model"}, ensure_ascii=False))
                print(json.dumps(file["model"], ensure_ascii=False)[:1500])
                return 1
    ours.stdin.close()
    if ours.wait() != 0:
        print(f"the program ended with {ours.returncode}")
        return 1
    print(f"tokenizers {tokenizers.__version__}, seed {seed}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if "--show" in sys.argv:
        for reason, n in reasons.most_common():
            print(f"  {n} x {reason}")
    return 0 if counts["texts"] > 0 else 1


sys.exit(main())
