#!/usr/bin/env python3
"""Refuses the private words that docs/internals/glossary.md replaced, in sources and documents.

    tools/check_words.py            prints file:line for each, and exits 1 if there is one

The table below has the word and what is written instead. docs/notes (dated records), docs/performance.md (generated), CHANGELOG.md and this file are not looked at."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = {
    r"copy engines?": "TMA",
    r"engine_takes|EnginePlace": "tma_compatible, TmaCoord",
    r"(?:Forward|Backward|Stream|Solved|Row|Fine|Pair|Wide|Chunk)Images?": "FwdTiles, BwdTiles, QETiles, XMTiles, RowTiles, LoTiles, IntraChunk",
    r"ChunkNumbers|BackwardNumbers": "RowScales, RowScalesBwd",
    r"FW_NUMBER|TokenNumbers|kButBeta|for_(?:each|all)_numbers?": "FW_TOKEN_SCALAR, TokenScalars, kExceptBeta, for_each_scalar",
    r"TurnChunk|turning_processors": "WorkTile, persistent_ctas",
    r"has_fine_images|wants_rests|pack_rests?": "uses_hi_lo, wants_hi_lo, pack_lo",
    r"FormedGates|is_formed|forms_gates": "FusedGates, is_fused, fuses_gates",
    r"WideForm|wide_rule|takes_wide": "K256Form, k256_rule, takes_k256",
    r"KeyHalves|key_halves": "SplitK, split_k",
    r"two_rows|TwoRows": "dplr_as_two_tokens, DplrAsTwoTokens",
    r"make_decay_keys": "make_key_from_decay",
    r"leaves_keys": "stores_k_hat",
    r"bare_keys|bare keys": "unscaled_keys, unscaled keys",
    r"whole_pieces|whole_pairs|whole pairs": "is_vec16, is_vec2, aligned pairs",
    r"FadeArg|kFaded": "DecayCutoffArg, kDecayCutoff",
    r"FewRowsArgs|SomeRowsArgs|few_rows_linear|some_rows_linear": "GemmM8Args, GemmM64Args, gemm_m8_linear, gemm_m64_linear",
    r"behind_gates|gradients_follow": "after_gate_kernel, overlap_grad_with_scan",
    r"PlaceFactor|place_factor": "PositionFactor, position_factor",
    r"mamba3_(?:turn|near|spread)(?:_\w+)?": "mamba3_rotary, mamba3_diag, mamba3_expand",
    r"scan_marks|turn_marks": "chunk_checkpoints, rotary_checkpoints",
    r"fw_solve|FW_SOLVE_\w+|kOffline|kOnline": "fw_update, FW_UPDATE_DELTA, kAdditive, kDelta",
    r"peer_types|PeerTensor|PeerKeys|PeerLayout|(?:config_(?:from|to)|is|unknown|set)_peer(?:_\w+)?|ModelConfig::peer": "hf_types, HfTensor, HfLayout, config_from_hf, ModelConfig::hf",
    r"(?:model|ops|scan|mamba3)_vectors(?:_test)?|VectorType|(?:Ops|Model)VectorOptions": "model_conformance, ConformanceType, OpsConformanceOptions",
    r"Masters": "MasterFormat",
    r"draw_parameters(?:_on_cuda)?|nn/draw": "init_random, nn/init_random",
    r"Given::\w+|(?:enum class|const) Given": "GateActivation",
    r"nn/\w+_plan|ProjectionPlan": "nn/*_params, Projections",
    r"again_arena_?|keeping_there|normed_again": "recompute_arena, on_transient_exec, recompute_norm",
    r"for_each_place|place_init|place_on_machine|CheckpointPlaces": "for_each_position, index_init, rank_on_machine, CheckpointRows",
    r"d?met(?=\.|,| \[)|near_weight": "qk_self, diag_weight",
    r"granules?|granule_offset": "atom, atom_offset",
    r"comput(?:e|es|ed) again": "recompute, recomputes, recomputed",
    r"multiprocessors?\b(?!\")": "SM",
}
# Words that are refused as names only, since English has them as well: (name, what is written instead, folders). The
# text is C++ or CUDA without its comments and strings. "in_place" and "InPlace" are the field's.
ALL = ("src/", "tests/", "bench/")
ENGINE = ("src/gpu/", "src/ops/", "src/scan/", "src/nn/", "src/model/", "src/train/")
NAMES = [
    (r"(?:\w*_)?places?(?:_\w*)?|(?:\w*[a-z0-9_])?Places?(?![a-z])\w*", "pos, index, offset, row, slot, coord", ALL),
    (r"(?:\w*_)?halves(?:_\w*)?|(?:\w*[a-z0-9_])?Halves(?![a-z])\w*", "f16, parts, split_k, rotate_half", ALL),
    (r"(?:\w*_)?rests?(?:_\w*)?|(?:\w*[a-z0-9_])?Rests?(?![a-z])\w*", "lo (of hi and lo), remaining, tail", ENGINE),
]
IN_PLACE = re.compile(r"in_?place", re.IGNORECASE)
# Comments of device code say position, index, offset or memory: a place is only what something is "in place of".
DEVICE = ("src/gpu/", "src/ops/", "src/scan/")
ENGLISH = re.compile(r"\b(?:in|takes?|took|taking) (?:its |their |the )?place\b|\blast places?\b|^\W*place of\b", re.IGNORECASE)
COMMENT_OR_STRING = re.compile(r'R"([^()\s]*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
KINDS = (".cpp", ".cu", ".cuh", ".h", ".def", ".c", ".md", ".cmake", ".py")
# Where one of them is right: the word of a driver or of another program.
ALLOWED = {("multiprocessor", "src/cli/"), ("multiprocessor", "tests/cli/"), ("multiprocessor", "docs/json.md"), ("multiprocessor", "python/")}
# Folders whose names are still old; take each away with its last word.
LATER = {
    "comput": ("tests/abi/",),
}
ALLOWED |= {(word, place) for word, places in LATER.items() for place in places}


def blank(match: re.Match) -> str:
    """Spaces of the same lines."""
    return re.sub(r"[^\n]", " ", match[0])


def names_in(name: str, text: str):
    """(line, word, better) of private names in a file of C++ or CUDA."""
    if not name.startswith(ALL) or name.startswith("tests/abi/") or name.endswith((".md", ".cmake", ".py")):
        return
    code = COMMENT_OR_STRING.sub(blank, text)
    for word, better, folders in NAMES:
        if not name.startswith(folders):
            continue
        for match in re.finditer(rf"\b(?:{word})\b", code):
            if not IN_PLACE.search(match[0]):
                yield text.count("\n", 0, match.start()) + 1, match[0], better
    if not name.startswith(DEVICE):
        return
    for comment in COMMENT_OR_STRING.finditer(text):
        if not comment[0].startswith("/"):
            continue
        for number, line in enumerate(comment[0].split("\n"), text.count("\n", 0, comment.start()) + 1):
            if match := re.search(r"\bplaces?\b", ENGLISH.sub("", line), re.IGNORECASE):
                yield number, match[0], "position, index, offset, memory"


def main() -> int:
    pattern = re.compile("|".join(rf"(?<![\w])(?P<w{i}>{word})(?!\w)" for i, word in enumerate(WORDS)))
    better = list(WORDS.values())
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    wrong = 0
    for name in files:
        if not name.endswith(KINDS) or name.startswith(("docs/notes/", "docs/results/")) or name in ("CHANGELOG.md", "docs/performance.md", "tools/check_words.py"):
            continue
        text = (ROOT / name).read_text(errors="replace")
        for number, word, instead in names_in(name, text):
            print(f"{name}:{number}: '{word}': expected {instead} (docs/internals/glossary.md)")
            wrong += 1
        for number, line in enumerate(text.splitlines(), 1):
            for match in pattern.finditer(line):
                if any(match[0].startswith(word) and name.startswith(place) for word, place in ALLOWED):
                    continue
                print(f"{name}:{number}: '{match[0]}': expected {better[int(match.lastgroup[1:])]} (docs/internals/glossary.md)")
                wrong += 1
    print(f"words: {len(files)} files, {wrong} private words")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
