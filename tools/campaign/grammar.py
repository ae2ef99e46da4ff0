"""Malformed values, texts, archives, pickles and images, made by rules and not by damage.

Each function draws one from a seeded generator and returns it with a few words on what it is.
"""

import io
import json
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

Described = tuple[str, bytes]

CONTROL = "a\x1b[31mb\x07\x00c\x7f\u202e"
HUGE = 10**30


def odd_value(random: Random, *, json_only: bool = False, depth: int = 0) -> Any:
    """Return a value that hardly any key expects."""
    scalars: list[Any] = [
        None, True, False, 0, -1, 1, 2.5, -0.0, float("nan"), float("inf"), -1e308, 1e-320, HUGE, -HUGE, 2**63, 2**31,
        "", " ", "null", "0", "-1", "nan", CONTROL, "\ud7ff\U0001f600", "x" * 5000, "../../etc/passwd", "/dev/zero",
        "hf-hub:nobody/nothing", "http://127.0.0.1:9/x", "file:///etc/passwd", "${HOME}", "!!python/name:os.system",
        [], {}, [None], {"": None}, [[]], {"a": {"b": {}}},
    ]  # fmt: skip
    if depth < 3 and random.random() < 0.25:
        count = random.randrange(4)
        if random.random() < 0.5:
            return [odd_value(random, json_only=json_only, depth=depth + 1) for _ in range(count)]
        return {random_key(random): odd_value(random, json_only=json_only, depth=depth + 1) for _ in range(count)}
    value = random.choice(scalars)
    return "surrogate" if json_only and value == "\ud7ff\U0001f600" else value


def random_key(random: Random) -> str:
    return random.choice(["", "name", "options", "0", "__class__", "a.b", "model", CONTROL, "x" * 300])


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values in nested lists and dictionaries."""
    found = [path] if path else []
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return found + [place for key, value in inner for place in places(value, (*path, key))]


def replace(content: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set the value at a path."""
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def delete(content: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        content = content[key]
    del content[path[-1]]


def alter(content: Any, random: Random, *, json_only: bool = False) -> str:
    """Replace or delete the value at a random place; return what was done."""
    path = random.choice(places(content))
    where = ".".join(map(str, path))
    if random.random() < 0.2:
        delete(content, path)
        return f"{where} deleted"
    value = odd_value(random, json_only=json_only)
    replace(content, path, value)
    return f"{where} = {repr(value)[:60]}"


# YAML


def odd_yaml(random: Random, sound: str) -> tuple[str, str]:
    """Return a YAML text that must be refused, made of a sound recipe, and what is wrong with it."""
    levels = random.choice([5, 12, 30, 100])
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(levels))
    maps = "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{x: *a{n}, y: *a{n}}}\n" for n in range(levels))
    depth = random.choice([70, 1000, 100_000])
    first = sound.strip().splitlines()[0]
    bad = {
        f"aliases of {levels} levels": sound + bomb,
        f"aliases of maps of {levels} levels": sound + maps,
        "an alias bomb as a value": bomb + sound + f"seed: *a{levels}\n",
        "merge keys to itself": "x: &x\n  <<: *x\n" + sound,
        "a list in itself": "seed: &s [1, *s]\n" + sound,
        "a map in itself": "model: &m {name: *m}\n" + sound,
        f"{depth} nested lists": sound + "seed: " + "[" * depth + "]" * depth,
        f"{depth} nested maps": sound + "seed: " + "{a: " * depth + "1" + "}" * depth,
        f"{depth} open lists": sound + "seed: " + "[" * depth,
        f"{depth} block lists": sound + "seed:\n " + "- " * depth + "1",
        "a repeated key": sound + first + "\n",
        "a repeated key in a section": sound + "ema: {decay: 0.9, decay: 0.5}\n",
        "a Python object": sound + "seed: !!python/object/apply:os.system ['touch CANARY']\n",
        "a Python name": sound + "seed: !!python/name:os.system\n",
        "a Python module": sound + "seed: !!python/module:os\n",
        "an unknown tag": sound + "seed: !secret 3\n",
        "an undefined alias": sound + "seed: *nothing\n",
        "a huge integer": sound + "seed: " + "9" * random.choice([40, 5000, 100_000]) + "\n",
        "a huge base-60 integer": sound + "seed: 1" + ":59" * 3000 + "\n",
        "no number at all": sound + "seed: .nan\n",
        "infinity": sound + "batch_size: .inf\n",
        "binary rubbish": sound + "seed: !!binary ====\n",
        "a set": sound + "seed: !!set {1, 2}\n",
        "pairs": sound + "seed: !!pairs [a: 1]\n",
        "a date": sound + "seed: 2020-01-01\n",
        "a list as a key": sound + "? [1, 2]\n: 3\n",
        "a map as a key": sound + "? {a: 1}\n: 3\n",
        "null as a key": sound + "? null\n: 3\n",
        "two documents": sound + "---\n" + sound,
        "a list": "- " + "\n- ".join(sound.strip().splitlines()),
        "a text": "nothing but text",
        "nothing": "",
        "only a comment": "# nothing\n",
        "tabs": sound.replace("  ", "\t"),
        "a null character": sound + "\0",
        "control characters in a key": sound + '"\\e[31mx\\a": 1\n',
        "its own base": "base: recipe.yaml\n" + sound,
        "a base outside": "base: ../../../../../../etc/passwd.yaml\n",
        "a base that is no text": "base: [1]\n",
        "an unknown version": "%YAML 9.9\n---\n" + sound,
        "an unclosed quote": sound + 'seed: "1\n',
        "many keys": sound + "".join(f"k{n}: {n}\n" for n in range(20_000)),
        "a text of 2 MB": sound + "seed: " + "x" * 2_000_000 + "\n",
    }
    what = random.choice(list(bad))
    return what, bad[what]


# JSON


def odd_json(random: Random, sound: bytes) -> Described:
    """Return bytes that are not JSON, or JSON of the wrong kind; all of it must be refused."""
    depth = random.choice([2000, 100_000, 1_000_000])
    bad = {
        "nothing": b"",
        "a null character": b"\0",
        "null": b"null",
        "a number": b"3",
        "a text": b'"text"',
        "a list": b"[]",
        "an empty object": b"{}",
        f"{depth} nested lists": b"[" * depth + b"]" * depth,
        f"{depth} open lists": b"[" * depth,
        f"{depth} nested objects": b'{"a":' * depth + b"1" + b"}" * depth,
        "a nested list as a value": b'{"images": ' + b"[" * depth + b"]" * depth + b"}",
        "a number of 100,000 digits": b'{"images": ' + b"9" * 100_000 + b"}",
        "no UTF-8": b'{"\xff\xfe": 1}',
        "UTF-16": sound.decode("utf-8", "replace").encode("utf-16-be") + b"\0",
        "two documents": sound + sound,
        "trailing comma": sound.rstrip().removesuffix(b"}") + b",}",
        "single quotes": sound.replace(b'"', b"'"),
        "a comment": b"// comment\n" + sound,
        "half of it": sound[: len(sound) // 2],
        "a bare word": b"{images: []}",
    }
    what = random.choice(list(bad))
    return what, bad[what]


def altered_json(random: Random, sound: bytes) -> Described:
    """Return JSON with an odd value at some place, or without it; Python's NaN and Infinity included."""
    content = json.loads(sound)
    what = alter(content, random, json_only=True)
    return what, json.dumps(content).encode()


# archives

ODD_NAME = "control characters in a name"


def odd_tar(random: Random, sound: bytes) -> tuple[str, bytes]:
    """Return a .tar file with a member that is no image although it has the name of one, or with a wrong structure."""
    with tarfile.open(fileobj=io.BytesIO(sound)) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        contents = [(member, None if file is None else file.read()) for member, file in members]
    image = next(content for member, content in contents if content)
    odd = _odd_members(image)
    what = random.choice([*odd, *_TAR_STRUCTURES])
    if what in _TAR_STRUCTURES:
        return what, _TAR_STRUCTURES[what](sound)
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=random.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])) as new:
        for member, content in contents:
            new.addfile(member, None if content is None else io.BytesIO(content))
        for member, content in odd[what]:
            new.addfile(member, io.BytesIO(content))
    return what, written.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> tuple[Any, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(content)
    return member, content


def _odd_members(image: bytes) -> dict[str, list[tuple[Any, bytes]]]:
    folder = "./val/dark"
    return {
        "a symbolic link to /etc/passwd": [_member(f"{folder}/x.png", tarfile.SYMTYPE, "/etc/passwd")],
        "a symbolic link to itself": [_member(f"{folder}/x.png", tarfile.SYMTYPE, "x.png")],
        "a symbolic link to a folder above": [_member(f"{folder}/up", tarfile.SYMTYPE, "..")],
        "a hard link": [_member(f"{folder}/x.png", tarfile.LNKTYPE, "./val/dark/000.png")],
        "a device": [_member(f"{folder}/x.png", tarfile.CHRTYPE)],
        "a FIFO": [_member(f"{folder}/x.png", tarfile.FIFOTYPE)],
        "an absolute name": [_member("/val/dark/x.png", content=image)],
        "a name that climbs": [_member("../val/dark/x.png", content=image)],
        "a name that climbs inside": [_member("./val/../val/dark/x.png", content=image)],
        "a repeated name": [_member(f"{folder}/000.png", content=image)],
        "an empty image": [_member(f"{folder}/x.png")],
        "a name of 5,000 characters": [_member(f"{folder}/{'x' * 5000}.png", content=image)],
        ODD_NAME: [_member(f"{folder}/\x1b[31m\n.png", content=image)],
        "an EPS": [_member(f"{folder}/x.jpg", content=EPS)],
        "a third class": [_member("./val/third/x.png", content=image)],
        "four archives inside each other": [_member(f"{folder}/x.tar", content=_nested(image, 4))],
        "three hundred archives inside each other": [_member("./val/x.tar", content=_nested(image, 300))],
    }


def _nested(image: bytes, depth: int) -> bytes:
    content, name = image, "x.png"
    for _ in range(depth):
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as archive:
            member, _ = _member(name, content=content)
            archive.addfile(member, io.BytesIO(content))
        content, name = written.getvalue()[: -8 * 512], "x.tar"
    return content + bytes(1024)


def _huge_size(sound: bytes) -> bytes:
    """Let the last member claim 8 GB."""
    with tarfile.open(fileobj=io.BytesIO(sound)) as archive:
        last = archive.getmembers()[-1]
    header = bytearray(sound[last.offset : last.offset + 512])
    header[124:136] = b"77777777777\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return sound[: last.offset] + bytes(header) + sound[last.offset + 512 :]


_TAR_STRUCTURES: dict[str, Callable[[bytes], bytes]] = {
    "a member that claims 8 GB": _huge_size,
    "no end marker": lambda sound: sound.rstrip(b"\0") + bytes(-len(sound.rstrip(b"\0")) % 512),
    "compressed": lambda sound: zlib.compress(sound),
    "two archives": lambda sound: sound + sound,
    "nothing": lambda sound: b"",
    "only zeros": lambda sound: bytes(10240),
    "text": lambda sound: b"this is not an archive\n" * 1000,
}


# pickles


def _malicious_calls(canary: Path) -> dict[str, tuple[str, str, tuple[Any, ...]]]:
    """Return functions by module and name, with arguments that create a file or start a program."""
    write = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": ("os", "system", (f"touch {canary}",)),
        "posix.system": ("posix", "system", (f"touch {canary}",)),
        "builtins.eval": ("builtins", "eval", (write,)),
        "builtins.exec": ("builtins", "exec", (write,)),
        "__builtin__.eval": ("__builtin__", "eval", (write,)),
        "builtins.open": ("builtins", "open", (str(canary), "w")),
        "builtins.getattr": ("builtins", "getattr", ("text", "upper")),
        "builtins.__import__": ("builtins", "__import__", ("antigravity",)),
        "subprocess.Popen": ("subprocess", "Popen", (["touch", str(canary)],)),
        "subprocess.check_output": ("subprocess", "check_output", (["touch", str(canary)],)),
        "os.mkdir": ("os", "mkdir", (str(canary),)),
        "pathlib.Path": ("pathlib", "Path", (str(canary),)),
        "pty.spawn": ("pty", "spawn", ("touch",)),
        "runpy.run_path": ("runpy", "run_path", (str(canary),)),
        "webbrowser.open": ("webbrowser", "open", ("http://127.0.0.1:9",)),
        "urllib.request.urlopen": ("urllib.request", "urlopen", ("http://127.0.0.1:9",)),
        "torch.load": ("torch", "load", (str(canary),)),
        "torch.save": ("torch", "save", ([1], str(canary))),
        "torch.hub.load": ("torch.hub", "load", ("nobody/nothing", "model")),
        "torch.classes.load_library": ("torch._ops", "load_library", (str(canary),)),
        "torch.jit.load": ("torch.jit", "load", (str(canary),)),
        "torch._utils._rebuild_device_tensor_from_numpy": (
            "torch._utils", "_rebuild_device_tensor_from_numpy", ([1.0], "float", "cpu", False),
        ),
        "torch.storage._load_from_bytes": ("torch.storage", "_load_from_bytes", (b"rubbish",)),
        "torch.empty": ("torch", "empty", (10**11,)),
        "bytearray": ("builtins", "bytearray", (10**11,)),
        "numpy.load": ("numpy", "load", (str(canary),)),
        "numpy._core.multiarray._reconstruct": ("numpy._core.multiarray", "_reconstruct", (list, (10**10,), b"b")),
        "functools.partial": ("functools", "partial", (print, "x")),
        "operator.attrgetter": ("operator", "attrgetter", ("__class__.__mro__",)),
        "collections.Counter": ("collections", "Counter", ("x",)),
        "timm.create_model": ("timm", "create_model", ("resnet18",)),
        "softline.cli.main": ("softline.cli", "main", (["models"],)),
        "nowhere.nothing": ("nowhere", "nothing", ()),
    }  # fmt: skip


def malicious_pickle(random: Random, canary: Path) -> Described:
    """Return a pickle that calls a function that no weights need."""
    calls = _malicious_calls(canary)
    what = random.choice(list(calls))
    module, name, arguments = calls[what]
    return what, _call_pickle(module, name, arguments, inside=random.random() < 0.5, protocol=random.choice([2, 4]))


def _call_pickle(module: str, name: str, arguments: tuple[Any, ...], *, inside: bool, protocol: int) -> bytes:
    """Write the opcodes: `pickle` itself would have to import the function."""
    if protocol == 2:
        function = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    else:
        function = _text(module) + _text(name) + b"\x93"
    body = pickle.dumps(arguments, 2)[2:-1]
    call = function + body + b"R"
    if inside:
        # {"state_dict": call}
        call = b"}(" + _text("state_dict") + call + b"u"
    return b"\x80" + bytes([protocol]) + call + b"."


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def odd_pickle(random: Random) -> Described:
    """Return a pickle without calls that torch never writes."""

    class Persistent(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return identity if value == "weights" else None

    identity: Any = random.choice(
        [1, None, "text", (), ("storage",), ("storage", "no type", "0", "cpu", 4), ("storage", 1, 2, 3, 4), [1], {}]
    )
    written = io.BytesIO()
    Persistent(written, 2).dump({"state_dict": {"a": "weights"}})
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    doubled: list[Any] = ["x"]
    for _ in range(60):
        doubled = [doubled, doubled]
    itself: list[Any] = []
    itself.append(itself)
    bad = {
        f"the persistent id {identity!r}": written.getvalue(),
        "nothing": b"",
        "no end": b"\x80\x02}",
        "an empty stack": b"\x80\x02.",
        "an unknown opcode": b"\x80\x02\xff.",
        "an unknown protocol": b"\x80\x63N.",
        "a memo that is not there": b"\x80\x02h\x05.",
        "a memo at 2**31": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a text that claims 4 GB": b"\x80\x02X\xff\xff\xff\xff",
        "bytes that claim 2**60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60),
        "a long that claims 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f",
        "nested lists": pickle.dumps(nested, 2),
        "100,000 open lists": b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",
        "lists that double 60 times": pickle.dumps({"format": 1, "recipe": {"a": doubled}}, 2),
        "a list in itself": pickle.dumps({"format": 1, "recipe": {"a": itself}}, 2),
        "a number": pickle.dumps(3, 2),
        "extension 1": b"\x80\x02\x82\x01.",
        "an instance": b"(ios\nsystem\n.",
    }
    what = random.choice(list(bad))
    return what, bad[what]


def zip_of(pickled: bytes, *, further: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive such as torch writes, with this pickle."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        for name, content in {
            "data.pkl": pickled,
            "version": b"3\n",
            "byteorder": b"little",
            **(further or {}),
        }.items():
            archive.writestr(f"archive/{name}", content)
    return written.getvalue()


def odd_zip(random: Random, sound: bytes) -> Described:
    """Return an archive whose structure torch never writes, made of a sound checkpoint."""
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    prefix = next(iter(entries)).partition("/")[0]
    compression = random.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    bomb = {**entries, f"{prefix}/data/99": bytes(50_000_000)}
    without = {name: content for name, content in entries.items() if not name.endswith("data.pkl")}
    bad = {
        "compressed entries": lambda: _zip(entries, compression),
        "a bomb": lambda: _zip(bomb, zipfile.ZIP_DEFLATED),
        "sizes of 4 GB": lambda: _claim(sound, 0xFFFFFFF0),
        "sizes of 0": lambda: _claim(sound, 0),
        "no data.pkl": lambda: _zip(without, zipfile.ZIP_STORED),
        "two data.pkl": lambda: _zip({**entries, "other/data.pkl": entries[f"{prefix}/data.pkl"]}, zipfile.ZIP_STORED),
        "an empty archive": lambda: _zip({}, zipfile.ZIP_STORED),
        "no weights": lambda: _zip({k: v for k, v in entries.items() if "/data/" not in k}, zipfile.ZIP_STORED),
        "short weights": lambda: _zip({k: v[:3] if "/data/" in k else v for k, v in entries.items()}, 0),
        "an encrypted entry": lambda: _encrypted(sound),
    }
    what = random.choice(list(bad))
    return what, bad[what]()


def _encrypted(sound: bytes) -> bytes:
    """Return the archive with a flag at each entry that says that it is encrypted."""
    content = bytearray(sound)
    for entry in re.finditer(b"PK\x01\x02", sound):
        content[entry.start() + 8] |= 1
    return bytes(content)


def _zip(entries: dict[str, bytes], compression: int) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return written.getvalue()


def _claim(sound: bytes, size: int) -> bytes:
    """Let the first entry of the directory of a zip archive have another size."""
    place = sound.index(b"PK\x01\x02")
    return sound[: place + 20] + struct.pack("<II", size, size) + sound[place + 28 :]


# images

EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    b"(campaign) print\n0 0 16 16 rectfill\nshowpage\n%%EOF\n"
)


def odd_image(random: Random) -> Described:
    """Return an image that is unusual, or something that has only the name of one."""
    made: dict[str, Callable[[], bytes]] = {
        **{name: partial(bytes, content) for name, content in _FOREIGN.items()},
        **{f"mode {mode} as {kind}": partial(_image, mode, kind) for mode, kind in _MODES},
        "1 x 1": lambda: _image("RGB", "PNG", (1, 1)),
        "1 x 4,000": lambda: _image("RGB", "PNG", (1, 4000)),
        "4,000 x 1": lambda: _image("RGB", "JPEG", (4000, 1)),
        "a PNG of 50,000 x 50,000": lambda: _png(50_000, 50_000),
        "a PNG of 0 x 0": lambda: _png(0, 0),
        "a PNG of 2**31 - 1 pixels a side": lambda: _png(2**31 - 1, 2**31 - 1),
        "a BMP of 2**31 - 1 pixels a side": lambda: _image("RGB", "BMP")[:18] + b"\xff\xff\xff\x7f" * 2 + bytes(500),
        "a text chunk that inflates to 50 MB": lambda: _png(
            16, 16, b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000))
        ),
        "an animation": lambda: _animation(random.choice(["GIF", "WEBP", "PNG", "TIFF"])),
        "broken EXIF": lambda: _exif(random.randbytes(60)),
        "a rotated image": lambda: _exif(_ORIENTATION + struct.pack("<H", random.randrange(12))),
        "a TIFF that refers to itself": lambda: b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "half a JPEG": lambda: _image("RGB", "JPEG")[:400],
        "half a PNG": lambda: _image("RGB", "PNG")[:100],
        "random bytes": lambda: random.randbytes(3000),
        "a signature and random bytes": lambda: random.choice(_SIGNATURES) + random.randbytes(3000),
    }  # fmt: skip
    what = random.choice(list(made))
    return what, made[what]()


_FOREIGN = {
    "an EPS": EPS,
    "a PDF": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
    "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "an XML bomb": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><svg>&b;</svg>',
    "nothing": b"",
    "text": b"no image",
    "a FITS": b"SIMPLE  =                    T" + b" " * 3000,
    "an MSP": b"DanM" + bytes(60),
    "a WMF": b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(60),
    "a GBR": b"\0\0\0\x1c\0\0\0\x02" + bytes(60),
}
_MODES = [
    ("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("P", "GIF"), ("RGBA", "PNG"), ("I;16", "PNG"),
    ("I;16", "TIFF"), ("I", "TIFF"), ("F", "TIFF"), ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("YCbCr", "JPEG"),
    ("LAB", "TIFF"), ("RGB", "ICO"), ("RGB", "PPM"), ("RGB", "TGA"), ("RGB", "PCX"), ("RGB", "MPO"),
    ("RGB", "JPEG2000"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("RGB", "PDF"), ("RGB", "EPS"),
    ("RGB", "ICNS"), ("RGB", "DDS"),
]  # fmt: skip
_SIGNATURES = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"RIFF\0\x10\0\0WEBP"]
# EXIF with one entry, the orientation
_ORIENTATION = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0"


def _image(mode: str, kind: str, size: tuple[int, int] = (20, 16)) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new(mode, size).save(written, format=kind)
    return written.getvalue()


def _animation(kind: str) -> bytes:
    from PIL import Image

    frames = [Image.new("RGB", (16, 16), (n, 0, 0)) for n in range(5)]
    written = io.BytesIO()
    frames[0].save(written, format=kind, save_all=True, append_images=frames[1:])
    return written.getvalue()


def _exif(content: bytes) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (20, 16)).save(written, format="JPEG", exif=content)
    return written.getvalue()


def _png(width: int, height: int, kind: bytes = b"tEXt", content: bytes = b"a\0b") -> bytes:
    """Return a PNG with the header of this size, a further chunk, and the pixels of a single line."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes(1 + 3 * min(width, 1000)))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(kind, content),
            chunk(b"IDAT", lines),
            chunk(b"IEND", b""),
        ]
    )
