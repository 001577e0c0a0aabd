#!/usr/bin/env python3
"""Register operands of wgmma in machine code: none may be written while a product that reads it is in flight.

    tools/check_products.py OBJECT...      objects or programs of nvcc for sm_90a, compiled as they are shipped (FW_CUDA_FAST_COMPILE=OFF)

Needs cuobjdump (CUDA's, or the one in Triton's package; CUOBJDUMP names another). PTX has no word for "these registers are read until the wait", ptxas reuses
them as soon as no instruction names them, and says nothing; the products are then wrong on a GPU, now and then, and right in the emulation. Follows the code in
its order and along its branches; one line a finding, exit 1 if there is one. Accumulators are ptxas's own care (it serialises products, and says so)."""

import glob
import os
import re
import shutil
import subprocess
import sys

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?\s*([A-Z0-9_.]+)\s*(.*?);")
REGISTER = re.compile(r"^R(\d+)(?:\.64)?\b")
# What writes no general register although its first operand is one, and what writes several from the first on.
NO_RESULT = re.compile(r"^(ST|RED|SYNCS|BAR|BRA|BRX|EXIT|MEMBAR|FENCE|UTMA|WARPGROUP|DEPBAR|NOP|BSYNC|BSSY|CALL|RET|JMP|WARPSYNC|ERRBAR|CCTL|UBLK|ACQBULK|LDGSTS|[A-Z]*SETP)")
WIDTHS = (("LDSM", lambda op: int(op[-1]) if op[-1].isdigit() else 1), (".128", lambda op: 4), (".64", lambda op: 2), (".WIDE", lambda op: 2))


def cuobjdump() -> str:
    named = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if named:
        return named
    places = ["/usr/local/cuda/bin/cuobjdump", *glob.glob(os.path.expanduser("~/.cache/fastweight/torch-*/lib/python*/site-packages/triton/backends/nvidia/bin/cuobjdump"))]
    for place in places:
        if os.path.exists(place):
            return place
    sys.exit("check_products: no cuobjdump (set CUOBJDUMP, or pip install triton, which has one)")


def width(op: str) -> int:
    for name, count in WIDTHS:
        if name in op:
            return count(op)
    return 1


def operand(text: str) -> int:
    m = REGISTER.match(text.strip())
    return int(m.group(1)) if m else -1


def blocks_of(code):
    """Index of every address, and of each instruction the ones that may follow."""
    at = {address: i for i, (address, _, _, _) in enumerate(code)}
    after = []
    for i, (_, op, rest, predicated) in enumerate(code):
        follow = []
        if op.startswith(("EXIT", "RET")):
            follow = [i + 1] if predicated else []
        elif op.startswith("BRA"):
            m = re.search(r"0x([0-9a-f]+)", rest)
            target = at.get(int(m.group(1), 16)) if m else None
            follow = ([target] if target is not None else []) + ([i + 1] if predicated or " P" in " " + rest.split(",")[0] or "UP" in rest else [])
        else:
            follow = [i + 1]
        after.append([f for f in follow if f < len(code)])
    return after


def findings(name, code):
    after = blocks_of(code)
    for i, (address, op, rest, _) in enumerate(code):
        if not op.startswith("HGMMA"):
            continue
        parts = rest.split(",")
        left = operand(parts[1]) if len(parts) > 2 else -1
        if left < 0:
            continue
        held = set(range(left, left + 4))
        # gsb0 is of the last of a group: how many groups are committed behind this product. A wait for at most n ends those before the last n.
        seen, stack = set(), [(after[i], 1 if "gsb0" in rest else 0)]
        while stack:
            nexts, groups = stack.pop()
            for j in nexts:
                if (j, groups) in seen or groups > 4:
                    continue
                seen.add((j, groups))
                at, what, how, _ = code[j]
                if what.startswith("WARPGROUP.DEPBAR"):
                    left_open = int(how.split(",")[1].strip(), 0)
                    if groups > left_open:
                        continue
                count = groups
                if what.startswith("HGMMA"):
                    count += 1 if "gsb0" in how else 0
                elif not NO_RESULT.match(what):
                    first = operand(how.split(",")[0])
                    hit = held & set(range(first, first + width(what))) if first >= 0 else set()
                    if hit:
                        yield f"{name}: {what} at {at:#x} writes R{min(hit)}, which the product at {address:#x} reads"
                        continue
                stack.append((after[j], count))


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    tool, bad, products = cuobjdump(), 0, 0
    for path in sys.argv[1:]:
        dump = subprocess.run([tool, "--dump-sass", path], capture_output=True, text=True, check=False)
        if dump.returncode != 0:
            sys.exit(f"check_products: {path}: {dump.stderr.strip() or 'cuobjdump failed'}")
        for part in dump.stdout.split("Function : ")[1:]:
            name = part.split("\n", 1)[0].strip()
            if "HGMMA" not in part:
                continue
            code = [(int(m.group(1), 16), m.group(2), m.group(3), "@" in m.group(0)) for m in INSTRUCTION.finditer(part)]
            products += sum(op.startswith("HGMMA") for _, op, _, _ in code)
            of_function = sorted(set(findings(name, code)))
            bad += len(of_function)
            for line in of_function[:4]:
                print(line)
            if len(of_function) > 4:
                print(f"{name}: and {len(of_function) - 4} more")
    print(f"check_products: {products} products, {bad} writes to operands in flight")
    return 1 if bad or not products else 0


if __name__ == "__main__":
    sys.exit(main())
