"""The tokenizer that AutoTokenizer finds in a model folder. Its tokenizer.json says bytes or SentencePiece, or is a file of Hugging Face's tokenizers."""

from __future__ import annotations

import json
import os

from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from fastweight._library import Error

_FILE, _MODEL = "tokenizer.json", "tokenizer.model"
_OF_FILE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class ByteTokenizer(PreTrainedTokenizer):
    """The engine's byte tokenizer: 256 tokens, one a byte.

    Programs of Hugging Face ask for special tokens, which bytes do not have. Here the byte 0 is padding and the end of a text, and a newline is what
    stands before a text, as `fastweight eval` has it. Nothing is added to a text, and skip_special_tokens drops the byte 0 alone.
    from_pretrained() of a folder with another tokenizer gives that: a SentencePieceTokenizer or a PreTrainedTokenizerFast.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer("hé").input_ids, tokenizer.decode([104, 195, 169])
    ([104, 195, 169], 'hé')
    """

    model_input_names = ["input_ids", "attention_mask"]
    vocab_files_names = {}

    def __init__(self, bos_token="\n", eos_token="\0", pad_token="\0", padding_side="left", clean_up_tokenization_spaces=False, **kwargs):
        super().__init__(bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, padding_side=padding_side,
                         clean_up_tokenization_spaces=clean_up_tokenization_spaces, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *inputs, **kwargs):
        """The tokenizer of a model folder; raises Error for a tokenizer of ids."""
        name = pretrained_model_name_or_path
        find = lambda file: cached_file(name, file, _raise_exceptions_for_missing_entries=False, **{k: kwargs[k] for k in _OF_FILE if k in kwargs})  # noqa: E731
        path = find(_FILE)
        content = {"type": "bytes"}  # as the engine has it
        if path is not None:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        if isinstance(content, dict) and isinstance(content.get("model"), dict):
            return PreTrainedTokenizerFast.from_pretrained(name, *inputs, **kwargs)
        kind = content.get("type", "something else") if isinstance(content, dict) else "something else"
        if kind not in ("bytes", "sentencepiece"):
            raise Error(f"'{path}': expected {{\"type\": \"bytes\"}}, {{\"type\": \"sentencepiece\", ...}} or a file of Hugging Face's tokenizers, got {kind}")
        if find("tokenizer_config.json") is None:
            kwargs.setdefault("added_tokens_decoder", {})  # else they are looked for in tokenizer.json
        if kind == "sentencepiece":
            kwargs.setdefault("vocab_file", find(content.get("model", _MODEL)))
            return SentencePieceTokenizer.from_pretrained(name, *inputs, **kwargs)
        return super().from_pretrained(name, *inputs, **kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self):
        return {**{chr(i): i for i in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [chr(byte) for byte in text.encode("utf-8", errors="surrogateescape")]

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    @property
    def all_special_ids(self) -> list[int]:
        return [i for i in super().all_special_ids if i != ord("\n")]

    def convert_tokens_to_string(self, tokens):
        return b"".join(bytes([ord(t)]) if len(t) == 1 and ord(t) < 256 else t.encode() for t in tokens).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return (_write(save_directory, filename_prefix, _FILE, b'{"type": "bytes"}\n'),)


class SentencePieceTokenizer(PreTrainedTokenizer):
    """A SentencePiece model with the engine's ids: nothing is added to a text, and "</s>" in a text is text. It needs the package sentencepiece.

    Where the model has no padding, its end of text is, or its unknown piece.

    >>> try:
    ...     tokenizer = SentencePieceTokenizer("/no/such/tokenizer.model")
    ... except (ImportError, Error):
    ...     print("refused")
    refused
    """

    model_input_names = ["input_ids", "attention_mask"]
    vocab_files_names = {"vocab_file": _MODEL}

    def __init__(self, vocab_file, padding_side="left", clean_up_tokenization_spaces=False, split_special_tokens=True, **kwargs):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ImportError(f"'{vocab_file}': expected the package sentencepiece (pip install sentencepiece), got: {error}") from error
        if not vocab_file or not os.path.isfile(vocab_file):
            raise Error(f"vocab_file: expected a SentencePiece model, got '{vocab_file}', which is no file")
        self.model = SentencePieceProcessor(model_file=vocab_file)
        for name in ("unk", "bos", "eos", "pad"):
            place = getattr(self.model, f"{name}_id")()
            if place >= 0:
                kwargs.setdefault(f"{name}_token", self.model.id_to_piece(place))
        kwargs.setdefault("pad_token", kwargs.get("eos_token", kwargs["unk_token"]))
        super().__init__(padding_side=padding_side, clean_up_tokenization_spaces=clean_up_tokenization_spaces, split_special_tokens=split_special_tokens, **kwargs)

    @property
    def vocab_size(self) -> int:
        return self.model.get_piece_size()

    def get_vocab(self):
        return {**{self.model.id_to_piece(i): i for i in range(self.vocab_size)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return self.model.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.model.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.model.id_to_piece(index)

    def convert_tokens_to_string(self, tokens):
        return self.model.decode(tokens)

    def _decode(self, token_ids, skip_special_tokens=False, **kwargs):
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if any(i >= self.vocab_size for i in ids):  # tokens that were added
            return super()._decode(ids, skip_special_tokens=skip_special_tokens, **kwargs)
        special = set(self.all_special_ids) if skip_special_tokens else ()
        return self.model.decode([i for i in ids if i not in special])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        model = _write(save_directory, filename_prefix, _MODEL, self.model.serialized_model_proto())
        return model, _write(save_directory, filename_prefix, _FILE, json.dumps({"type": "sentencepiece", "model": os.path.basename(model)}).encode() + b"\n")


def _write(folder, prefix, name, content):
    path = os.path.join(folder, (f"{prefix}-" if prefix else "") + name)
    with open(path, "wb") as file:
        file.write(content)
    return path
