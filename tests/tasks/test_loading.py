"""Files that were damaged, made by others, or made to do harm."""

import json
import os
import random
import subprocess
import sys
import textwrap

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import softline
from softline.engine.train import train
from softline.errors import UserError
from softline.process import ALLOCATING
from softline.tasks.loading import load_trained
from tests.engine.small import small_recipe, write_images


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    write_images(root)
    train(small_recipe(root, "--schedule.epochs", "0.2", "--schedule.warmup_epochs", "0"))
    return root / "run" / "last.pt"


@pytest.fixture
def changed(run, tmp_path):
    """Write the checkpoint with other content at a path of keys; DELETED removes the key."""

    def write(keys, value):
        content = torch.load(run, weights_only=True)
        *path, last = keys.split("/")
        place = content
        for key in path:
            place = place[key]
        if value is DELETED:
            del place[last]
        else:
            place[last] = value
        torch.save(content, tmp_path / "changed.pt")
        return str(tmp_path / "changed.pt")

    return write


DELETED = object()
ENTRIES = (
    *("arch", "state_dict", "state_dict_ema", "optimizer", "scaler", "step", "epoch", "metrics", "evaluated_step"),
    *("best", "recipe", "facts"),
)


def test_the_checkpoint_itself_loads(run):
    assert load_trained(str(run)).classes == ("dark", "light")
    for source in (run, str(run)):
        trained = softline.load(source)
        assert (trained.task, trained.name, trained.classes) == ("classification", "softpp_micro", ("dark", "light"))


LOADING = """
import sys
from softline import process
from softline.tasks.loading import load_trained
def resident():
    return int(process.STATM.read_text().split()[1]) * 4096
load_trained(sys.argv[1])
process.keep_memory(largest=process.INFERENCE_BLOCK)
before = resident()
kept = load_trained(sys.argv[2])
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of the process is read from /proc")
def test_the_memory_of_a_checkpoint_is_returned_once_its_network_is_loaded(run, changed):
    tensors = [torch.zeros(2**21) for _ in range(20)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATING)}
    command = [sys.executable, "-c", LOADING, str(run), changed("optimizer/state", tensors)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(loaded.stdout) < 4 * 2 * 2**21


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_must_be_there_and_of_its_kind(changed, entry):
    with pytest.raises(UserError, match=f"has no {entry}"):
        load_trained(changed(entry, DELETED))
    for wrong in ("text" if entry != "arch" else 3, [1], torch.ones(2), True):
        with pytest.raises(UserError, match=rf"{entry} in .*changed\.pt must be .*, got"):
            load_trained(changed(entry, wrong))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("facts/classes", DELETED, "facts has no classes"),
        ("facts/classes", [], "facts name no classes"),
        ("facts/classes", "ab", r"classes in facts must be list\[str\], got 'ab'"),
        ("facts/classes", [1, 2], r"classes in facts must be list\[str\]"),
        ("facts/classes", ["a", "b", "c"], r"head.weight \(2, 16\) \(expected \(3, 16\)\)"),
        ("state_dict/extra", torch.ones(2), "1 unexpected: extra"),
        ("state_dict/head.bias", DELETED, "1 missing: head.bias"),
        ("state_dict/head.bias", torch.ones(3), r"head.bias \(3,\) \(expected \(2,\)\)"),
        ("state_dict/head.bias", torch.ones(2).long(), r"head.bias torch.int64 \(expected torch.float32\)"),
        ("state_dict/head.bias", [0.0, 0.0], r"state_dict in .* must be dict\[str, Tensor\]"),
        ("state_dict/head.bias", torch.tensor([0.0, float("nan")]), "head.bias in .* is not finite"),
        ("state_dict/head.bias", torch.zeros(1).expand(10**12), "out of proportion"),
        ("recipe/task", "nothing", "task must be one of"),
        ("recipe/model", [], "model must hold keys and values"),
        ("recipe/model/name", 3, "model.name"),
        ("recipe/model/name", "softpp_nano", "no model 'softpp_nano'"),
        ("recipe/model/options/embed_dims", [10**6] * 4, "describes a network with more parameters than"),
        ("recipe/model/options/depths", [1, 1, 1, 10**9], "depths is refused: 1,000,000,000 is more than"),
        ("recipe/model/options/depths", [1, 1, 1, 10**6], "describes a network with more parameters than"),
        ("recipe/model/options/embed_dims", "wide", "embed_dims must have a value for each of 4 stages"),
        ("recipe/model/options/nothing", 3, "model.options of softpp_micro"),
        ("recipe/data/image_size", -5, "image_size"),
        ("recipe/data/mean", ["a"], "mean"),
        ("best", {"top1": "high"}, r"best in .* must be dict\[str, float\]"),
        ("step", 2**70, "step in .* 71 bits"),
    ],
)
def test_what_is_wrong_is_said(changed, keys, value, message):
    with pytest.raises(UserError, match=message):
        load_trained(changed(keys, value))


@pytest.mark.parametrize(
    "option", ["checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"]
)
def test_a_recipe_in_a_checkpoint_names_no_files(changed, option):
    with pytest.raises(UserError, match=f"model.options.{option} is refused"):
        load_trained(changed(f"recipe/model/options/{option}", "somewhere"))


@pytest.mark.parametrize(
    "name", ["hf-hub:someone/model", "hf_hub:someone/model", "HF-HUB:a/b", "local-dir:somewhere", "timm/x"]
)
def test_a_recipe_in_a_checkpoint_names_no_places(changed, name):
    with pytest.raises(UserError, match=r"model\.name must be the name of a model"):
        load_trained(changed("recipe/model/name", name))


def test_no_flipped_bit_and_no_missing_end_goes_unnoticed(run, tmp_path):
    whole, sound = run.read_bytes(), torch.load(run, weights_only=True)
    numbers, path, refused = random.Random(1), tmp_path / "damaged.pt", 0
    for _ in range(60):
        damaged = bytearray(whole)
        if numbers.random() < 0.3:
            del damaged[numbers.randrange(len(whole)) :]
        else:
            # the ends of the file hold the names and sizes of its entries
            damaged[int(len(whole) * numbers.betavariate(0.3, 0.3)) % len(whole)] ^= 1 << numbers.randrange(8)
        path.write_bytes(damaged)
        try:
            model = load_trained(str(path)).model
        except UserError:
            refused += 1
        else:
            assert all(torch.equal(value, sound["state_dict"][name]) for name, value in model.state_dict().items())
    assert refused > 30


# directories that timm saved


@pytest.fixture
def saved(tmp_path):
    options = {"embed_dims": [8, 8, 16, 16], "num_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}
    model = timm.create_model("softpp_micro", num_classes=3, **options)
    save_for_hf(
        model,
        tmp_path / "saved",
        model_args=options,
        model_config={"label_names": ["a", "b", "c"]},
        safe_serialization=True,
    )
    return tmp_path / "saved", model.eval()


def edit(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_a_saved_model_comes_back(saved, prefix):
    directory, model = saved
    trained = softline.load(f"{prefix}{directory}")
    assert trained.classes == ("a", "b", "c")
    assert trained.name == "softpp_micro"
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(trained.model.eval()(images), model(images))


@pytest.mark.parametrize("names", [{"0": "a", "2": "c"}, [5, 6, 7]])
def test_names_of_classes_may_have_gaps_and_be_numbers(saved, names):
    directory, _ = saved
    edit(directory, label_names=names)
    expected = ("a", "1", "c") if isinstance(names, dict) else ("5", "6", "7")
    assert load_trained(str(directory)).classes == expected


def test_buffers_count_as_well(tmp_path):
    """The masks of large windows, which timm computes from the sizes, take gigabytes."""
    model = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=12, depths=(2, 2), num_heads=(1, 2))
    sizes = {"embed_dim": 12, "depths": [2, 2], "num_heads": [1, 2], "img_size": 2048, "window_size": 128}
    save_for_hf(model, tmp_path / "saved", model_args=sizes, safe_serialization=True)
    with pytest.raises(UserError, match=r"describes a network with more (buffers|parameters) than"):
        load_trained(str(tmp_path / "saved"))


def test_weights_as_a_pickle_are_read_and_never_run(saved, tmp_path):
    directory, model = saved
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    assert torch.equal(load_trained(str(directory)).model.state_dict()["head.bias"], model.head.bias)
    torch.save({**weights, "evil": Evil(str(tmp_path / "ran"))}, directory / "pytorch_model.bin")
    for prefix in ("", "local-dir:"):
        with pytest.raises(UserError, match="it asks to run"):
            load_trained(f"{prefix}{directory}")
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": 3}, "architecture in config.json must be str, got 3"),
        ({"architecture": "hf-hub:someone/model"}, "must be the name of a model"),
        ({"architecture": "softpp_nano"}, "no model 'softpp_nano'"),
        ({"model_args": [1]}, "model_args in config.json must be dict"),
        ({"model_args": {"checkpoint_path": "x.bin"}}, "model_args.checkpoint_path is refused"),
        ({"model_args": {"pretrained_cfg": {"file": "x.bin"}}}, "model_args.pretrained_cfg is refused"),
        ({"model_args": {"depths": [1, 1, 1, 10**6]}}, "describes a network with more parameters than"),
        ({"model_args": {"depths": "deep"}}, "depths must have a value for each of 4 stages"),
        ({"model_args": {"depths": [1, 1, 1, {}]}}, "softpp_micro cannot be built from its config.json"),
        ({"pretrained_cfg": "text"}, "pretrained_cfg in config.json must be a dictionary"),
        ({"pretrained_cfg": {"input_size": [3, 0, 0]}}, "input_size in config.json must be 3 positive numbers"),
        ({"pretrained_cfg": {"mean": "grey"}}, "mean in pretrained_cfg in config.json must be"),
        ({"pretrained_cfg": {"interpolation": "magic"}}, "interpolation"),
        ({"label_names": 7}, "label_names"),
        ({"model_args": {"embed_dims": [10**5] * 4}}, "more parameters than"),
    ],
)
def test_what_is_wrong_in_a_saved_config_is_said(saved, changes, message):
    directory, _ = saved
    edit(directory, **changes)
    with pytest.raises(UserError, match=message):
        load_trained(str(directory))


def test_a_saved_config_cannot_name_other_weights(saved, tmp_path):
    directory, model = saved
    torch.save({"evil": Evil(str(tmp_path / "ran"))}, tmp_path / "evil.bin")
    places = {"file": str(tmp_path / "evil.bin"), "url": "http://localhost:9/x.bin", "hf_hub_id": "someone/model"}
    config = json.loads((directory / "config.json").read_text())
    edit(directory, pretrained_cfg={**config["pretrained_cfg"], **places, "custom_load": True, "source": "file"})
    assert torch.equal(load_trained(str(directory)).model.state_dict()["head.bias"], model.head.bias)
    assert not (tmp_path / "ran").exists()


def test_weights_of_a_saved_model_must_be_finite(saved):
    directory, _ = saved
    weights = load_file(directory / "model.safetensors")
    weights["head.bias"][0] = float("nan")
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"head\.bias in .*model\.safetensors is not finite"):
        load_trained(str(directory))


def test_opening_files_starts_no_program_and_makes_no_request(saved, run, changed, tmp_path):
    """An audit hook cannot be removed, so another process sets it."""
    directory, _ = saved
    far = changed("recipe/model/name", "hf-hub:someone/model")
    script = f"""
    import sys
    WATCHED = ("socket.", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "urllib.Request")
    import softline.tasks.loading
    from softline.errors import UserError
    sys.addaudithook(lambda event, _: print(event) if event.startswith(WATCHED) else None)
    for source in {[str(directory), str(run), far]!r}:
        try:
            print(softline.tasks.loading.load_trained(source).kind)
        except UserError as error:
            print("refused")
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.split("\n") == ["a classifier", "a classifier", "refused", ""], process.stderr
