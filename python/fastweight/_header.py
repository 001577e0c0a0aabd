"""The C header as ctypes: its enums and structs, read from the file itself.

fastweight.h is the one description of the calls. It lies in the package beside the library that it belongs to, so a field
that is added there is here without a second list, and the two cannot disagree. What is read is what the header has: enums of
named numbers, structs of integers, doubles, pointers, arrays of numbers, and structs defined before.
"""

import ctypes
import re

_TYPES = {
    "size_t": ctypes.c_size_t,
    "int8_t": ctypes.c_int8,
    "int16_t": ctypes.c_int16,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
}


def _comment(match):
    """A comment that begins with the name of an enum says which one a field holds and is kept as that name alone."""
    word = re.match(r"/\*\s*(fw_\w+)\b(?!\()", match.group())
    return f"/*{word.group(1)}*/" if word else " "


class Header:
    """enums: {"fw_decay": {"none": 0, ...}}, named as a rule is written; structs: {"fw_desc": its ctypes class};
    field_enums: {("fw_rule", "decay"): "fw_decay"}."""

    def __init__(self, text):
        self.enums = {}
        self.structs = {}
        self.field_enums = {}
        text = re.sub(r"/\*.*?\*/", _comment, text, flags=re.S)
        for name, body in re.findall(r"typedef enum (\w+) \{(.*?)\} \1;", text, re.S):
            prefix = name.upper() + "_"
            if not re.search(rf"\b{prefix}", body):
                prefix = "FW_"  # fw_status, fw_dtype, fw_state_layout
            items = re.findall(r"(\w+)\s*=\s*(\d+)", body)
            self.enums[name] = {key[len(prefix):].lower(): int(value) for key, value in items}
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.S):
            self.structs[name] = self._struct(name, body)

    def _struct(self, struct, body):
        fields = []
        for kind, names, enum in re.findall(r"(?:const\s+)?(\w+\s*\*?)\s*([^;/]+);[ \t]*(?:/\*(\w+)\*/)?", body):
            for name in names.split(","):
                array = re.fullmatch(r"\s*(\w+)\[(\d+)\]\s*", name)
                name = array.group(1) if array else name.strip()
                base = ctypes.c_void_p if "*" in kind else self.structs.get(kind.strip()) or _TYPES[kind.strip()]
                fields.append((name, base * int(array.group(2)) if array else base))
                if enum in self.enums:
                    self.field_enums[struct, name] = enum
        return type(struct, (ctypes.Structure,), {"_fields_": fields})
