"""Files made to do harm to whoever loads them: every one would leave a marker, fill the memory, or never end."""

import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import save
from torch import nn

PAYLOAD = "hostile_payload"  # a module that stands beside the files; importing it leaves the marker


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.what = (function, args)

    def __reduce__(self):
        return self.what


def pickled(value, protocol=2):
    return pickle.dumps(value, protocol)


def literal(*values):
    """The instructions of a pickle for some values, without those that begin and end it."""
    return b"".join(pickled(value)[2:-1] for value in values)


def call(name, *args, inner=None):
    """Those for ``name(*args)``."""
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n(".encode() + (literal(*args) if inner is None else inner) + b"tR"


def stream(body):
    return b"\x80\x02" + body + b"."


def under(key, body):
    """A dict with one key, whose value is what ``body`` makes."""
    return stream(b"}" + literal(key) + body + b"s")


def archive(data, entries=None, root="archive", compressed=False, twice=False):
    out = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", kind) as file:
        file.writestr(f"{root}/data.pkl", data)
        file.writestr(f"{root}/byteorder", "little")
        for name, content in (entries or {f"{root}/data/0": bytes(16)}).items():
            file.writestr(name, content)
        if twice:
            file.writestr(f"{root}/data.pkl", data)
        file.writestr(f"{root}/version", "3\n")
    return out.getvalue()


def tensor(storage=b"", offset=0, shape=(2, 2), stride=(2, 1), key="0", count=4, kind="torch\nFloatStorage"):
    pid = storage or b"(" + literal("storage") + f"c{kind}\n".encode() + literal(key, "cpu", count) + b"t"
    rest = literal(offset, shape, stride, False) + b"}"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"Q" + rest + b"tR"


def safetensors(header, data=bytes(64), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def pickles(marker):
    """Pickles that run something, by name."""
    touch = f"open({marker!r}, 'w').close()"
    run = call("os.system", f"touch {marker}")
    return {
        "os-system": run,
        "posix-system": call("posix.system", f"touch {marker}"),
        "open": call("builtins.open", marker, "w"),
        "open-2": call("__builtin__.open", marker, "w"),
        "io-open": call("io.open", marker, "w"),
        "eval": call("builtins.eval", touch),
        "exec": call("builtins.exec", touch),
        "subprocess": call("subprocess.check_output", ["touch", marker]),
        "import": call("importlib.import_module", PAYLOAD),
        "__import__": call("builtins.__import__", PAYLOAD),
        "module": f"c{PAYLOAD}\nthing\n".encode(),
        "module-4": b"\x8c" + bytes([len(PAYLOAD)]) + PAYLOAD.encode() + b"\x8c\x05thing\x93",
        "module-object": f"c{PAYLOAD}\nThing\n)\x81}}b".encode(),
        "instance-1": f"(i{PAYLOAD}\nThing\n".encode(),
        "instance-2": f"(c{PAYLOAD}\nThing\no".encode(),
        "extension": b"\x82\x01",
        "pathlib": call("pathlib.Path.touch", marker),
        "partial": call("functools.partial", inner=b"cos\nsystem\n" + literal(f"touch {marker}")),
        "getattr": call("builtins.getattr", inner=f"c{PAYLOAD}\nthing\n".encode() + literal("run")),
        "torch-load": call("torch.load", marker + ".pt"),
        "torch-bytes": call("torch.storage._load_from_bytes", pickle.dumps(Call(os.system, f"touch {marker}"))),
        "torch-jit": call("torch.jit.load", marker),
        "numpy-load": call("numpy.load", marker + ".npy", None, True),
        "numpy-object": call("numpy._core.multiarray.scalar", inner=call("numpy.dtype", "O8", False, True) + run),
        "lightning": call("lightning.pytorch.cli.instantiate_module", inner=f"c{PAYLOAD}\nThing\n}}".encode()),
        "operator": call("operator.methodcaller", inner=literal("touch")) + b"cpathlib\nPath\n" + b"\x85R",
        "types": call("types.FunctionType", inner=call("builtins.compile", touch, "x", "exec") + b"}"),
        "reconstructor": call("copyreg._reconstructor", inner=f"c{PAYLOAD}\nThing\ncbuiltins\nobject\nN".encode()),
        "ordered-dict": b"ccollections\nOrderedDict\n" + run + b"\x85R",
        "set": call("builtins.set", inner=b"]" + run + b"a"),
        "default-factory": call("collections.defaultdict", inner=b"cos\nsystem\n"),
        "parameter": call("torch._utils._rebuild_parameter", inner=run + b"\x89}"),
        "from-type": call(
            "torch._tensor._rebuild_from_type_v2",
            inner=f"cos\nsystem\nc{PAYLOAD}\nThing\n".encode() + literal((f"touch {marker}",)) + b"N",
        ),
        "sparse": call(
            "torch._utils._rebuild_sparse_tensor",
            inner=b"ctorch.serialization\n_get_layout\n(" + run + b"tR(" + run + b"t",
        ),
        "wrapper": call("torch._utils._rebuild_wrapper_subclass", inner=f"c{PAYLOAD}\nThing\n".encode() + run),
        "storage-call": tensor(storage=run),
        "storage-nested": tensor(storage=b"(" + literal("storage") + run + literal("0", "cpu") + b"K\x04t"),
        "storage-class": tensor(kind=f"{PAYLOAD}\nThing"),
        "set-state": b"ccollections\nOrderedDict\n)R}" + literal("__class__") + f"c{PAYLOAD}\nThing\nsb".encode(),
    }


def greedy():
    """Pickles that ask for memory or time without an end."""
    laughs = b"".join(b"(" + b"h%c" % n * 10 + b"tq%c" % (n + 1) for n in range(60))
    text = b"X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"q\x000"
    encoded = b"c_codecs\nencode\n(h\x00X\x06\x00\x00\x00latin1tR"
    return {
        "bytearray": call("builtins.bytearray", 10**11),
        "bytes": call("builtins.bytes", 10**11),
        "range-set": call("builtins.set", inner=call("builtins.range", 10**10)),
        "laughs": b"(" + literal("lol") + b"tq\x00" + laughs,
        "copies": text + b"](" + encoded * 50_000 + b"e",
        "deep": b"]" * 200_000 + b"a" * 199_999,
        "deep-tuples": b")" + b"\x85" * 200_000,
        "itself": b"]q\x00h\x00a",
        "itself-dict": b"}q\x00" + literal("weight") + b"h\x00s",
        "huge-int": b"\x8b" + struct.pack("<I", 10**6) + b"\xff" * 10**6,
        "huge-int-key": b"}\x8b" + struct.pack("<I", 10**6) + b"\x7f" * 10**6 + b"Ns",
        "decimal": b"I" + b"9" * 10**6 + b"\n",
        "long-promise": b"\x8d" + struct.pack("<Q", 2**62) + b"x",
        "same-hash": b"}(" + b"".join(literal((2**61 - 1) * n) + b"N" for n in range(20_000)) + b"u",
        "many": b"N0" * 2_000_000 + b"N",
        "array": call("numpy._core.multiarray._reconstruct", inner=b"cnumpy\nndarray\n(K\x00tC\x01b")
        + literal((1, (10**6, 10**6), None, False, b""))
        + b"b",
        "shape-text": call("numpy.dtype", "U2000000000", False, True),
        "expand": tensor(offset=0, shape=(10**12,), stride=(0,)),
        "beyond": tensor(offset=10**9),
        "negative": tensor(offset=-4),
        "negative-stride": tensor(stride=(-2, 1)),
        "huge-shape": tensor(shape=(2**40, 2**40), stride=(2**40, 1)),
        "long-storage": tensor(count=10**12),
        "lost-storage": tensor(key="../../etc/passwd"),
        "stack": b"0",
        "marks": b"u",
        "memo": b"h\x07",
    }


def zips(good):
    """Archives that are not what they say."""
    whole = archive(good)
    ends = bytearray(whole)
    at = whole.rfind(b"PK\x05\x06")
    struct.pack_into("<I", ends, at + 12, 0xFFFFFFF0)
    return {
        "bomb": archive(b"\x80\x02" + b"N0" * 10_000_000 + b"N.", compressed=True),
        "bomb-tensor": archive(good, {"archive/data/0": bytes(10**7)}, compressed=True),
        "twice": archive(good, twice=True),
        "parent": archive(good, {"archive/data/../../../x": b"x"}),
        "absolute": archive(good, {"/etc/x": b"x"}),
        "backslash": archive(good, {"archive\\..\\x": b"x"}),
        "script": archive(good, {"archive/code/__torch__.py": b"x", "archive/constants.pkl": b"x"}),
        "cut": whole[:-40],
        "directory": bytes(ends),
        "no-pickle": archive(b""),
        "arrays": archive(b"", {"archive/x.npy": b"x"}),
        "garbage": b"PK\x03\x04" + os.urandom(4096),
        "many-entries": archive(good, {f"archive/data/{n}": b"" for n in range(20_000)}),
    }


def headers(keys):
    """Safetensors files that are not what they say."""
    deep = b'{"weight":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return {
        "long-header": safetensors({"weight": entry()}, length=2**40),
        "longest-header": safetensors({"weight": entry()}, length=2**64 - 1),
        "no-header": safetensors(b"", b""),
        "cut": safetensors({"weight": entry(shape=(1000, 1000), offsets=(0, 4_000_000))}),
        "deep": safetensors(deep),
        "overlap": safetensors({"weight": entry(), "bias": entry(shape=(2,), offsets=(8, 16))}),
        "huge-shape": safetensors({"weight": entry(shape=(2**40, 2**40))}),
        "overflow": safetensors({"weight": entry(shape=(2**32, 2**32, 4))}),
        "negative": safetensors({"weight": entry(shape=(-2, -2))}),
        "backwards": safetensors({"weight": entry(offsets=(16, 0))}),
        "dtype": safetensors({"weight": entry(dtype="O")}),
        "twice": safetensors(b'{"weight":%s,"weight":%s}' % ((json.dumps(entry()).encode(),) * 2)),
        "notes": safetensors({"__metadata__": {"aliases": "[" * 5000}, "weight": entry()}, bytes(16)),
        "aliases": safetensors({"__metadata__": {"aliases": '{"bias": "none"}'}, "weight": entry()}, bytes(16)),
        "alias-list": safetensors({"__metadata__": {"aliases": '{"bias": ["weight"]}'}, "weight": entry()}, bytes(16)),
        "shards": safetensors({"__metadata__": {"DCP_SHARDING_INFO": "{"}, "weight": entry()}, bytes(16)),
        "keys": safetensors({f"k{n}": entry(shape=(0,), offsets=(0, 0)) for n in range(keys)}, b""),
        "infinity": safetensors(b'{"weight": Infinity}'),
    }


def corpus(folder, marker, keys=20_000):
    """Write all of them; returns the paths of files and folders by name. ``good-...`` are harmless, to compare with."""
    folder = Path(folder)
    (folder / f"{PAYLOAD}.py").write_text(f"open({marker!r}, 'w').close()\nclass Thing: pass\nthing = Thing()\n")
    good = torch_bytes({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    pickle_bytes = under("weight", tensor())
    files = {
        "good.pt": good,
        "good.safetensors": safetensors({"weight": entry(), "bias": entry(shape=(2,), offsets=(16, 24))}, bytes(24)),
    }
    for name, body in {**pickles(marker), **greedy()}.items():
        files[f"pickle-{name}.pt"] = archive(under("weight", body))
    for name, body in {**pickles(marker), **greedy()}.items():
        files[f"lightning-{name}.ckpt"] = lightning(body)
    for name, data in {"os": call("os.system", f"touch {marker}"), "open": call("builtins.open", marker, "w")}.items():
        files[f"root-{name}.bin"] = archive(stream(data))
        files[f"raw-{name}.pth"] = stream(data)
        files[f"legacy-{name}.pt"] = legacy(under("weight", data))
        files[f"legacy-system-{name}.pt"] = legacy(under("weight", tensor()), system=stream(data))
        files[f"protocol-5-{name}.pt"] = archive(b"\x80\x05\x95" + struct.pack("<Q", len(data) + 1) + data + b".")
    files["legacy-count.pt"] = legacy(under("weight", tensor()), count=2**60)
    files |= {f"zip-{name}.pt": data for name, data in zips(pickle_bytes).items()}
    files |= {f"header-{name}.safetensors": data for name, data in headers(keys).items()}
    files["tar.pt"] = _tar(marker)
    files["array.npy"] = _npy(marker)
    files |= {"empty.pt": b"", "noise.bin": os.urandom(1000), "text.ckpt": b"{" * 100_000}
    index = {"metadata": {}, "weight_map": {"weight": "../outside.bin"}}
    files["index-parent.index.json"] = json.dumps(index).encode()
    files["index-pickle.index.json"] = json.dumps({"weight_map": {"weight": "root-os.bin"}}).encode()
    files["index-pipe.index.json"] = json.dumps({"weight_map": {"weight": "pipe"}}).encode()
    files["index-keys.index.json"] = json.dumps({"weight_map": {f"k{n}": "good.pt" for n in range(keys)}}).encode()
    files["index-deep.index.json"] = b'{"weight_map":' * 50_000
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "pipe")
    (folder / "device.pt").symlink_to("/dev/zero")
    (folder / "nowhere.pt").symlink_to(folder / "nowhere.pt")
    return {name: folder / name for name in [*files, "pipe", "device.pt", "nowhere.pt"]} | folders(folder, files)


def folders(folder, files):
    """The same things in the folders that loaders look into."""
    found = {}
    for name, inside in {
        "dcp": {".metadata": "raw-os.pth", "__0_0.distcp": "raw-os.pth"},
        "hub-bin": {"pytorch_model.bin": "root-os.bin"},
        "hub-index": {"pytorch_model.bin.index.json": "index-pickle.index.json", "root-os.bin": "root-os.bin"},
        "hub-safe": {"model.safetensors": "header-huge-shape.safetensors"},
        "accelerate": {"optimizer.bin": "root-os.bin", "random_states_0.pkl": "raw-os.pth"},
        "lightning-folder": {"last.ckpt": "lightning-os-system.ckpt"},
    }.items():
        (folder / name).mkdir()
        for file, source in inside.items():
            (folder / name / file).write_bytes(files[source])
        found[name] = folder / name
    (folder / "hub-pipe").mkdir()
    os.mkfifo(folder / "hub-pipe" / "model.safetensors")
    return found | {"hub-pipe": folder / "hub-pipe"}


def of_ours(whole, folder, marker):
    """Checkpoints of Treadle's own format, made from a whole one, with what a hostile hand would put into it."""
    folder = Path(folder)
    state = {path.name: path for path in whole.iterdir()}
    found = {}
    for name, data in _documents(marker).items():
        for part in [n for n in state if n.endswith(".json") and n != "manifest.json"]:
            found[f"ours-{part.removesuffix('.json')}-{name}"] = _forged(whole, folder, {part: data})
        found[f"ours-manifest-{name}"] = _forged(whole, folder, {}, manifest=data)
    for name, data in headers(1000).items():
        found[f"ours-weights-{name}"] = _forged(whole, folder, {"model.safetensors": data})
    document = json.loads(state["manifest.json"].read_text())
    for name, value in {"processes": 2**60, "sequence": 10**30}.items():
        counted = {**document, {"processes": "world_size"}.get(name, name): value}
        found[f"ours-many-{name}"] = _forged(whole, folder, {}, manifest=json.dumps(counted).encode())
    for name in ("../outside.json", "/etc/passwd", "..", "a/b.json", "x.pkl", "manifest.json", "\0.json"):
        target = _forged(whole, folder, {}, listed=name)
        found[f"ours-named-{len(found)}"] = target
    linked = _forged(whole, folder, {})
    (linked / "model.safetensors").rename(folder / "elsewhere.safetensors")
    (linked / "model.safetensors").symlink_to(folder / "elsewhere.safetensors")
    piped = _forged(whole, folder, {})
    (piped / "manifest.json").unlink()
    os.mkfifo(piped / "manifest.json")
    pickled_beside = _forged(whole, folder, {})
    (pickled_beside / ".metadata").write_bytes(stream(call("os.system", f"touch {marker}")))
    (pickled_beside / "random_states_0.pkl").write_bytes(stream(call("os.system", f"touch {marker}")))
    return found | {"ours-link": linked, "ours-pipe": piped, "ours-beside": pickled_beside}


def _documents(marker):
    """JSON of Treadle's own form, and text that is none."""
    texts = {
        "tag-import": {"$import": "os"},
        "tag-call": {"$call": ["os.system", f"touch {marker}"]},
        "tag-path": {"$path": "\0" * 10},
        "tag-int": {"$int": "0x" + "f" * 10**6},
        "tag-float": {"$float": "1" * 10**6},
        "tag-tensor": {"$tensor": "nowhere"},
        "tag-dtype": {"$dtype": "os.system"},
        "tag-device": {"$device": "x:y"},
        "tag-array": {"$array": ["O", "x"]},
        "tag-size": {"$size": ["a"]},
        "tag-two": {"$tuple": [], "$list": []},
        "tag-pairs": {"$dict": [[[], 1]]},
        "tag-scalar": {"$numpy": ["object", "x"]},
        "list": [],
        "text": "x",
        "empty": {},
        "states": {"optimizers": 1, "registered": []},
    }
    raw = {
        "deep": b"[" * 200_000,
        "deep-object": b'{"a":' * 50_000,
        "nan": b"NaN",
        "twice": b'{"a":1,"a":2}',
        "not-text": b"\xff\xfe",
        "digits": b"[" + b"9" * 10**5 + b"]",
    }
    return {**{name: json.dumps(text).encode() for name, text in texts.items()}, **raw}


def predictions(whole, folder, marker):
    """Folders of predictions: their index, the notes in their files and these files themselves forged."""
    (shard,) = whole.glob("*.safetensors")
    index = json.loads((whole / "predictions.json").read_text())
    forged = {f"index-{name}": {"predictions.json": data} for name, data in _documents(marker).items()}
    outside = {"outside": [["../whole/" + shard.name]], "absolute": [[str(shard)]], "kind": [1], "no": 7}
    for name, ranks in outside.items():
        loader = {**index["loaders"]["0"], "ranks": ranks}
        forged[f"index-{name}"] = {"predictions.json": json.dumps({**index, "loaders": {"0": loader}}).encode()}
    for name, data in _documents(marker).items():
        for form in (b"%s", b"[[0,%s]]", b'[["x",{"prediction":%s}]]'):
            note = (form % data).decode(errors="replace")
            forged[f"note-{name}-{form}"] = {shard.name: _one_tensor({"predictions": note})}
    forged["note-missing"] = {shard.name: _one_tensor(None)}
    forged |= {f"shard-{name}": {shard.name: data} for name, data in headers(1000).items()}
    found = {}
    for number, (name, files) in enumerate(forged.items()):
        found[name] = target = Path(folder) / f"predictions-{number}"
        target.mkdir()
        for path in whole.iterdir():
            (target / path.name).write_bytes(files.get(path.name, path.read_bytes()))
    return found


def _one_tensor(notes):
    return save({"0.prediction": torch.ones(2)}, notes)


def projects(made, folder):
    """Each checkpoint as the newest of a project whose checkpoints are numbered."""
    found = {}
    for number, (name, path) in enumerate(made.items()):
        target = Path(folder) / f"project-{number}" / "checkpoints"
        target.mkdir(parents=True)
        path.rename(target / "checkpoint_0")
        found[name] = target.parent
    return found


def _forged(whole, folder, files, manifest=None, listed=None):
    target = folder / f"forged-{len(list(folder.iterdir()))}"
    target.mkdir()
    for path in whole.iterdir():
        (target / path.name).write_bytes(files.get(path.name, path.read_bytes()))
    document = json.loads((target / "manifest.json").read_text())
    for name, data in files.items():
        old = document["files"][name]
        kind = next(key for key in old if key != "bytes")
        digest = xxhash.xxh3_128(data).hexdigest() if kind == "xxh3_128" else hashlib.new(kind, data).hexdigest()
        document["files"][name] = {**old, "bytes": len(data), kind: digest}
    if listed is not None:
        document["files"][listed] = next(iter(document["files"].values()))
    (target / "manifest.json").write_bytes(json.dumps(document).encode() if manifest is None else manifest)
    return target


def settings(folder, marker):
    """Files of hyperparameters, by name."""
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
    )
    texts = {
        "apply.yaml": f"width: !!python/object/apply:os.system ['touch {marker}']\n",
        "new.yaml": f"width: !!python/object/new:{PAYLOAD}.Thing []\n",
        "module.yaml": f"width: !!python/module:{PAYLOAD}\n",
        "name.yaml": f"width: !!python/name:{PAYLOAD}.thing\n",
        "eval.yml": f"width: !!python/object/apply:builtins.eval [\"open('{marker}', 'w')\"]\n",
        "laughs.yaml": laughs,
        "merges.yaml": merges,
        "deep.yaml": "[" * 20_000,
        "deeper.yaml": "- " * 20_000 + "x",
        "digits.yaml": "width: " + "9" * 100_000,
        "long.yaml": "a: b\n" * 10**6,
        "list.yaml": "[1]",
        "empty.yaml": "",
        "code.csv": f"key,value\nwidth,__import__('os').system('touch {marker}')\n",
        "program.py": f"open({marker!r}, 'w')",
    }
    found = {}
    for name, text in texts.items():
        found[f"settings-{name}"] = Path(folder) / f"settings-{name}"
        found[f"settings-{name}"].write_text(text)
    os.mkfifo(Path(folder) / "pipe.yaml")
    return found | {"settings-pipe": Path(folder) / "pipe.yaml"}


def torch_bytes(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def lightning(body):
    """A Lightning checkpoint with good weights, whose hyperparameters and callbacks are what ``body`` makes."""
    weights = b"}(" + literal("weight") + tensor() + b"u"
    parts = {"state_dict": weights, "hyper_parameters": b"}" + literal("width") + body + b"s", "callbacks": body}
    data = b"}(" + b"".join(literal(key) + part for key, part in parts.items()) + b"u"
    return archive(stream(data))


def legacy(data, system=None, count=4):
    head = pickled(0x1950A86A20F9469CFC6C) + pickled(1001)
    system = pickled({"little_endian": True, "protocol_version": 1001}) if system is None else system
    return head + system + data + pickled(["0"]) + struct.pack("<Q", count) + bytes(16)


def _tar(marker):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, data in {"pickle": stream(call("os.system", f"touch {marker}")), "../escaped": b"x"}.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            file.addfile(about, io.BytesIO(data))
    return out.getvalue()


def _npy(marker):
    out = io.BytesIO()
    np.save(out, np.array([Call(os.system, f"touch {marker}")], dtype=object), allow_pickle=True)
    return out.getvalue()


def model():
    return nn.Linear(2, 2)
