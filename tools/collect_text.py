#!/usr/bin/env python3
"""Text of Debian's packages of documentation, as documents: the longest real text at hand to train and judge language models on.

    tools/collect_text.py OUT [--packages FOLDER] [--held-out BYTES] [--train BYTES] [--sample BYTES]

Fetches the packages of PACKAGES below with `apt-get download` into FOLDER (OUT/packages; those that lie there are not fetched again, so that a folder that was kept
gives the same text again), takes the text out of them and writes

    OUT/train.jsonl, OUT/valid.jsonl   a document a line: {"text", "package", "path"}
    OUT/sample.txt                     of each document that is not held out its beginning, the same share of all, BYTES (8,000,000) together: to train a tokenizer on
    OUT/sources.json                   the packages with version, bytes and documents, and the SHA-256 of both texts

Nothing depends on the time, the machine or the order in which files are found: documents are sorted by the SHA-256 of their names. Held out are the first of those
with 64 KiB to 1 MiB, up to BYTES (3,000,000), so that every held-out document is long enough to be read at a context of 16,000 tokens. --train: the training text is no longer than BYTES; in that order, a document that does
not fit any more is passed over. A document that is there a
second time, to the byte, is left out.
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import subprocess
import sys
import tempfile

# Of each package the files that are its text, once: a package that has the same pages in several forms is read in one of them.
PACKAGES = {
    "linux-doc-6.1": r"/Documentation/.*\.(rst|txt|yaml)(\.gz)?$",
    "python3.11-doc": r"/_sources/.*\.rst\.txt$",
    "perl-doc": r"\.pod(\.gz)?$",
    "rust-doc": r"/html/(?!.*(/print\.html|/toc\.html))(book|reference|nomicon|rust-by-example|rustc|rustdoc|cargo|edition-guide)/.*\.html$",
    "octave-doc": r"octave.html/.*\.html$|/interpreter/.*\.html$|\.info(-\d+)?\.gz$",
    "maxima-doc": r"/html/(?!.*/(de|es|pt|ja|ru|fr)[^/]*/).*\.html$",
    "postgresql-doc-15": r"/html/.*\.html$",
    "vim-doc": r"/html/.*\.html$",
    "git-doc": r"\.txt$",
    "debian-policy": r"\.txt(\.gz)?$",
    "debian-reference-en": r"\.txt(\.gz)?$|\.en\.html$",
    "developers-reference": r"\.txt(\.gz)?$",
    "manpages": r"/man\d/.*\.gz$",
    "manpages-dev": r"/man\d/.*\.gz$",
    "freebsd-manpages": r"/man\d/.*\.gz$",
    "dict-gcide": r"\.dict\.dz$",
    "dict-foldoc": r"\.dict\.dz$",
    "dict-jargon": r"\.dict\.dz$",
}
SHORTEST = 1000  # characters of a document


class Page(html.parser.HTMLParser):
    """The text of a page without navigation, scripts and the like."""

    SKIPPED = {"script", "style", "head", "nav", "footer", "aside", "svg", "button", "form", "math"}
    # of the program that made the page, not of its text
    CLASSES = {"navheader", "navfooter", "spirit-nav", "sidebar", "related", "sphinxsidebar", "sub", "out-of-band", "srclink", "header", "nav-panel", "nav-wrapper"}
    BLOCKS = {"p", "div", "br", "li", "tr", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "table", "ul", "ol", "dl", "section", "hr", "blockquote"}
    VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces, self.open, self.skipping, self.pre = [], [], 0, 0

    def handle_starttag(self, tag, attributes):
        if tag in self.VOID:
            if tag in self.BLOCKS:
                self.pieces.append("\n")
            return
        classes = set((dict(attributes).get("class") or "").split())
        skip = tag in self.SKIPPED or bool(classes & self.CLASSES)
        self.open.append((tag, skip))
        self.skipping += skip
        self.pre += tag == "pre"
        if tag in self.BLOCKS:
            self.pieces.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4") else "\n")

    def handle_endtag(self, tag):
        if all(t != tag for t, _ in self.open):
            return
        while self.open:
            found, skip = self.open.pop()
            self.skipping -= skip
            self.pre -= found == "pre"
            if found == tag:
                break
        if tag in self.BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data):
        if not self.skipping:
            self.pieces.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        return "".join(self.pieces)


# Macros whose arguments are text.
ROFF_TEXT = {"SH", "SS", "B", "I", "BR", "RB", "BI", "IB", "RI", "IR", "SM", "SB", "IP", "TP", "Sh", "Ss", "Nm", "Nd", "Op", "Ar", "Fl", "Pa", "Xr", "Dv", "Er", "Ev", "Fa", "Fn",
             "Ft", "Fd", "It", "Li", "Em", "Sy", "Cm", "Ic", "Va", "Vt", "Ql", "Dq", "Sq", "Aq", "Pq", "Bq", "Cd", "In", "An", "Tn", "Bx", "Fx", "Nx", "Ox", "At", "St", "Lb", "Qq", "Ad"}  # fmt: skip


def from_roff(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if line.startswith((".", "'")):
            name, _, rest = line[1:].strip().partition(" ")
            if name not in ROFF_TEXT:
                continue
            if name in ("SH", "SS", "Sh", "Ss"):
                lines.append("")
            line = rest.replace('"', "")
        line = re.sub(r'\\".*$', "", line)
        line = re.sub(r"\\f(\(..|\[[^]]*\]|.)|\\s[-+]?\d|\\[&|^/,:%)]", "", line)
        line = re.sub(r"\\\*\(?[lr]q", '"', line).replace("\\(em", "--").replace("\\(bu", "*").replace("\\(aq", "'").replace("\\(dq", '"').replace("\\(co", "(c)")
        lines.append(line.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\~", " ").replace("\\(", ""))
    return "\n".join(lines)


def document(path: str, data: bytes) -> str:
    if path.endswith((".gz", ".dz")):
        data = gzip.decompress(data)
        path = path[:-3]
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if path.endswith((".html", ".htm")):
        page = Page()
        page.feed(text)
        page.close()
        text = page.text()
    elif re.search(r"/man\d/", path):
        text = from_roff(text)
    text = "".join(c for c in text if c in "\n\t" or c.isprintable())
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def fetch(folder: pathlib.Path) -> dict:
    folder.mkdir(parents=True, exist_ok=True)

    def there() -> dict:
        return {name: sorted(folder.glob(f"{name}_*.deb")) for name in PACKAGES}

    if missing := [name for name, files in there().items() if not files]:
        done = subprocess.run(["apt-get", "download", "-q"] + missing, cwd=folder)
        if done.returncode != 0:
            sys.exit(f"collect_text: apt-get download {' '.join(missing)} ended with {done.returncode}: the packages are those of Debian 12")
    packages = {}
    for name, files in there().items():
        if len(files) != 1:
            sys.exit(f"collect_text: '{folder}' has {len(files)} packages {name}, expected one")
        packages[name] = files[0]
    return packages


def documents_of(name: str, package: pathlib.Path) -> list:
    wanted, found = re.compile(PACKAGES[name]), []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", str(package), folder], check=True)
        for path in sorted(pathlib.Path(folder).rglob("*")):
            short = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file() or not wanted.search("/" + short):
                continue
            text = document(short, path.read_bytes())
            if len(text) >= SHORTEST:
                found.append({"text": text, "package": name, "path": short})
    return found


def write(path: pathlib.Path, documents: list) -> dict:
    digest, size = hashlib.sha256(), 0
    with path.open("w", encoding="utf-8") as file:
        for one in documents:
            file.write(json.dumps(one, ensure_ascii=False) + "\n")
            digest.update(one["text"].encode() + b"\0")
            size += len(one["text"].encode())
    return {"documents": len(documents), "bytes": size, "sha256": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--packages", type=pathlib.Path)
    parser.add_argument("--held-out", type=int, default=3_000_000)
    parser.add_argument("--train", type=int, default=1 << 62)
    parser.add_argument("--sample", type=int, default=8_000_000)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    packages, seen, documents, sources = fetch(a.packages or a.out / "packages"), set(), [], {}
    for name, package in packages.items():
        kept = []
        for one in documents_of(name, package):
            digest = hashlib.sha256(one["text"].encode()).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(one)
        version = subprocess.run(["dpkg-deb", "-f", str(package), "Version"], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
        sources[name] = {"version": version, "documents": len(kept), "bytes": sum(len(d["text"].encode()) for d in kept)}
        print(f"{name} {version}: {sources[name]['documents']} documents, {sources[name]['bytes'] / 1e6:.1f} MB", flush=True)
        documents += kept
    documents.sort(key=lambda d: hashlib.sha256(f"{d['package']}/{d['path']}".encode()).digest())
    held_out, room = [], a.held_out
    for one in documents:
        size = len(one["text"].encode())
        if 2**16 <= size <= min(2**20, room):
            held_out.append(one)
            room -= size
    chosen, total = {id(d) for d in held_out}, sum(len(d["text"]) for d in documents)
    rest, train, room = [d for d in documents if id(d) not in chosen], [], a.train
    with (a.out / "sample.txt").open("w", encoding="utf-8") as file:
        for one in rest:
            file.write(one["text"][: len(one["text"]) * a.sample // total] + "\n")
            size = len(one["text"].encode())
            if size <= room:
                train.append(one)
                room -= size
    texts = {"train": write(a.out / "train.jsonl", train), "valid": write(a.out / "valid.jsonl", held_out)}
    (a.out / "sources.json").write_text(json.dumps({"packages": sources, "texts": texts}, indent=1) + "\n")
    for name, text in texts.items():
        print(f"{name}: {text['documents']} documents, {text['bytes'] / 1e6:.1f} MB, SHA-256 {text['sha256']}")


main()
