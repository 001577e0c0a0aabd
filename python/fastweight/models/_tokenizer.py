"""The tokenizer that AutoTokenizer finds in a model folder: its tokenizer.json says bytes, or is a file of Hugging Face's tokenizers."""

from __future__ import annotations

import json
import os

from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from fastweight._library import Error

_FILE = "tokenizer.json"
_OF_FILE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class ByteTokenizer(PreTrainedTokenizer):
    """The engine's byte tokenizer: 256 tokens, one a byte.

    Programs of Hugging Face ask for special tokens, which bytes do not have. Here the byte 0 is padding and the end of a text, and a newline is what
    stands before a text, as `fastweight eval` has it. Nothing is added to a text, and skip_special_tokens drops the byte 0 alone.
    from_pretrained() of a folder whose tokenizer.json is one of Hugging Face's tokenizers gives a PreTrainedTokenizerFast.

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
        """The tokenizer of a model folder; raises Error where it is neither bytes nor a file of Hugging Face's tokenizers."""
        name = pretrained_model_name_or_path
        find = lambda file: cached_file(name, file, _raise_exceptions_for_missing_entries=False, **{k: kwargs[k] for k in _OF_FILE if k in kwargs})  # noqa: E731
        path = find(_FILE)
        kind = _kind(path)
        if kind == "tokenizers":
            return PreTrainedTokenizerFast.from_pretrained(name, *inputs, **kwargs)
        if kind != "bytes":
            raise Error(f"'{path}': expected {{\"type\": \"bytes\"}} or a file of Hugging Face's tokenizers, got {kind}" +
                        (": fastweight export writes its tokenizer.model for transformers" if kind == "sentencepiece" else ""))
        if find("tokenizer_config.json") is None:
            kwargs.setdefault("added_tokens_decoder", {})  # else they are looked for in tokenizer.json
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
        path = os.path.join(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + _FILE)
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"type": "bytes"}\n')
        return (path,)


def _kind(path):
    """ "bytes", "tokenizers" (Hugging Face's), or what else the file says."""
    if path is None:  # as the engine has it
        return "bytes"
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        return "tokenizers"
    return content.get("type", "something else") if isinstance(content, dict) else "something else"
