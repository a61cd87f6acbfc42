"""Starting from weights: frozen parts, slower layers, a wider or narrower window."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from data import prepare
from kit import finetune
from kit.checkpoint import load_model
from kit.errors import UserError
from kit.files import read_json
from kit.run import locate, store
from kit.run.locate import find_checkpoint

CONFIG = """
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 8
warmup_iters = 1
eval_interval = 8
learning_rate = 1e-2
min_lr = 1e-3
dtype = "float32"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(out, *flags) trains on a text of bytes; returns the run folder."""
    monkeypatch.setenv("BONSAI_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("BONSAI_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("kit.run.report.write_sample", lambda *args: "")  # tested elsewhere
    monkeypatch.setattr("kit.plot.draw", lambda *a, **k: None)
    monkeypatch.setattr("kit.device.peak_flops", lambda *args: 1e11)
    text, config = tmp_path / "text.txt", tmp_path / "test.py"
    text.write_text("".join(f"{i} bottles of beer on the wall\n" for i in range(400)))
    config.write_text(CONFIG)

    def go(out: str, *flags: str) -> Path:
        source = any(f.startswith("--init_from=") for f in flags)
        more = [] if source else ["--tokenizer=byte"]
        start = [str(config), f"--dataset={text}"] if "--init_from=resume" not in flags else []
        code = train.main([*start, f"--out_dir={tmp_path / out}", *more, *flags])
        assert code == 0
        return tmp_path / out

    return go




def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(find_checkpoint(path) / "model.safetensors")


def losses(path: Path) -> list[float]:
    rows = map(json.loads, (path / "log.jsonl").read_text().splitlines())
    return [r["loss"] for r in rows if "loss" in r]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parts_stay_as_the_weights_have_them(run, capsys, optimizer):
    base = run("base")
    path = run("tuned", f"--init_from={base}", "--freeze=wte h.0", f"--optimizer={optimizer}")
    before, after = weights(base), weights(path)
    for name in before:
        frozen = name.startswith(("wte.", "h.0."))
        assert torch.equal(before[name], after[name]) == frozen, name
    still = sum(w.numel() for n, w in before.items() if n.startswith(("wte.", "h.0.")))
    assert f"({still:,} of them frozen)" in capsys.readouterr().out
    state = load_file(find_checkpoint(path) / "optimizer.safetensors")
    assert not any(name.startswith(("wte.", "h.0.")) for name in state)


def test_a_run_with_frozen_parts_goes_on_bit_for_bit(run, monkeypatch):
    base, tuned = run("base"), ["--freeze=wpe h.1.mlp", "--layer_lr_decay=0.7", "--dropout=0.1"]
    whole = run("whole", f"--init_from={base}", *tuned)
    run("parts", f"--init_from={base}", *tuned, "--max_iters=4", "--eval_interval=4",
        "--lr_decay_iters=8")
    run("parts", "--init_from=resume", "--max_iters=8")  # all else as it was, the text too
    ours, theirs = weights(whole), weights(run_path(whole, "parts"))
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    with pytest.raises(UserError, match="cannot change from freeze=wpe h.1.mlp to freeze=wpe"):
        run("parts", "--init_from=resume", "--freeze=wpe", "--max_iters=9")


def run_path(other: Path, name: str) -> Path:
    return other.parent / name


def test_slower_layers_move_less(run):
    base = run("base")
    moved = {}
    for decay in (1.0, 0.1):
        path = run(f"decay{decay}", f"--init_from={base}", f"--layer_lr_decay={decay}",
                   "--weight_decay=0")
        before, after = weights(base), weights(path)
        moved[decay] = {n: float((after[n] - before[n]).norm()) for n in before}
    for name in ("wte.weight", "wpe.weight"):
        assert moved[0.1][name] < 0.02 * moved[1.0][name]
    assert 0.02 < moved[0.1]["h.0.mlp.c_fc.weight"] / moved[1.0]["h.0.mlp.c_fc.weight"] < 0.1
    assert moved[0.1]["ln_f.weight"] > 0.3 * moved[1.0]["ln_f.weight"]


@pytest.mark.parametrize("how", ["interpolate", "hierarchical", "copy"])
def test_a_wider_window_is_an_act(run, how, capsys):
    base = run("base", "--max_iters=60", "--eval_interval=60")
    with pytest.raises(UserError, match="--extend_positions=interpolate, hierarchical or copy"):
        run("wider", f"--init_from={base}", "--block_size=40")
    path = run("wider", f"--init_from={base}", "--block_size=40", f"--extend_positions={how}")
    assert losses(path)[0] < 5.5 - 1  # far below ln(257): it did not forget its words
    model = load_model(find_checkpoint(path))[0]
    assert model.config.block_size == 40
    run("frozen", f"--init_from={base}", "--block_size=40", f"--extend_positions={how}",
        "--freeze=wpe")
    expected = finetune.resize(weights(base)["wpe.weight"], 40, how)
    assert torch.equal(weights(run_path(base, "frozen"))["wpe.weight"], expected)
    again = run("wider", "--init_from=resume", "--max_iters=9")
    assert len(losses(again)) == 9  # a run that goes on has its positions already


def test_a_wider_model_is_evaluated_as_it_would_start(run, capsys):
    base = run("base")
    flags = [f"--init_from={base}", "--block_size=40", "--extend_positions=copy"]
    capsys.readouterr()
    run("none", *flags, "--eval_only=True")
    said = capsys.readouterr().out
    run("none", f"--init_from={base}", "--block_size=16", "--eval_only=True")
    assert "validation loss" in said and said.split("validation")[-1] != \
        capsys.readouterr().out.split("validation")[-1]
    assert not (base.parent / "none").exists()


def test_a_smaller_context_takes_the_first_positions(run):
    base = run("base")
    path = run("smaller", f"--init_from={base}", "--block_size=8", "--freeze=wpe")
    assert torch.equal(weights(path)["wpe.weight"], weights(base)["wpe.weight"][:8])


@pytest.mark.parametrize("flags, words", [
    (["--extend_positions=copy"], "extend_positions=copy: needs weights to start from"),
    (["--init_from=BASE", "--extend_positions=copy"], "larger --block_size than that, not 16"),
    (["--init_from=BASE", "--extend_positions=copy", "--block_size=8"], "not 8"),
    (["--init_from=BASE", "--extend_positions=hierarchical", "--block_size=300"], "16 x 16 = 256"),
    (["--init_from=BASE", "--gelu=erf"], "gelu=erf, but the weights of"),
    (["--init_from=BASE", "--freeze=wpx"], "freeze=wpx: no parameter"),
    (["--layer_lr_decay=0"], "layer_lr_decay=0"), (["--layer_lr_decay=1.5"], "layer_lr_decay=1.5"),
])
def test_what_cannot_be_is_refused(run, flags, words):
    base = run("base", "--max_iters=2") if "BASE" in str(flags) else Path()
    with pytest.raises(UserError, match=words) as error:
        run("other", *(f.replace("BASE", str(base)) for f in flags))
    assert len(str(error.value).splitlines()) == 1
    assert not (base.parent / "other" / "ckpt").exists()


@pytest.mark.parametrize("base_flag, expected", [("", 16), ("--logn_base=9", 9)])
def test_clipped_log_n_remembers_the_context_it_was_trained_with(run, base_flag, expected):
    base = run("base", "--attn_logn=clipped", *([base_flag] if base_flag else []))
    path = run("wider", f"--init_from={base}", "--block_size=40", "--extend_positions=interpolate")
    assert read_json(find_checkpoint(path) / "model.json")["logn_base"] == expected


def test_erf_gelu_is_another_model(run):
    tanh, erf = run("tanh"), run("erf", "--gelu=erf")
    assert losses(tanh) != losses(erf)
    assert losses(tanh) == pytest.approx(losses(erf), abs=0.02)
    assert load_model(find_checkpoint(erf))[0].config.gelu == "erf"


# -------------------------------------------------------------------------- starting and going on


def test_the_same_command_goes_on_with_an_unfinished_run_from_weights(run, monkeypatch, capsys):
    base = run("base")
    whole = run("whole", f"--init_from={base}")

    handle = train.Trainer.batches
    monkeypatch.setattr(train.Trainer, "batches", lambda self, first: (
        setattr(self.interrupt, "signal", 2 if self.progress.step == 3 else None),
        handle(self, first))[1])
    with pytest.raises(AssertionError):
        run("parts", f"--init_from={base}")
    assert "Go on with:" in capsys.readouterr().out
    monkeypatch.undo()
    path = run("parts", f"--init_from={base}")
    assert "going on with" in capsys.readouterr().out
    ours, theirs = weights(whole), weights(path)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    with pytest.raises(UserError, match="holds a run"):  # it is finished now
        run("parts", f"--init_from={base}")


def imported(run, tmp_path) -> Path:
    """A folder of weights alone, as an import makes it."""
    folder = find_checkpoint(run("first"))
    model, tokenizer, _ = load_model(folder)
    store.save_weights(tmp_path / "weights", model.config, dict(model.named_parameters()),
                            tokenizer, {"from": "a test"})
    return tmp_path / "weights"


def test_a_run_from_weights_alone_and_never_inside_them(run, tmp_path):
    folder = imported(run, tmp_path)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(UserError, match="holds weights alone"):
        run("weights", f"--init_from={folder}")
    assert sorted(p.name for p in folder.iterdir()) == before
    path = run("tuned", f"--init_from={folder}", "--learning_rate=1e-6", "--min_lr=0")
    assert losses(path)[0] < 5.5 - 0.5  # not from ln(257)


@pytest.mark.parametrize("config", ["finetune", "sft"])
def test_presets_for_given_weights(run, tmp_path, config, monkeypatch):
    """As they are, but for the weights, the data and the number of updates."""
    base = run("base", "--block_size=64")
    samples = tmp_path / "sums.jsonl"
    samples.write_text("".join(json.dumps(
        {"prompt": f"{i}+{i}\n", "completion": f"twice {i}: {2 * i}"}) + "\n" for i in range(300)))
    code = train.main([f"config/{config}.py", f"--init_from={base}", f"--dataset={samples}",
                       "--max_iters=12", "--warmup_iters=2", "--eval_interval=6",
                       "--learning_rate=1e-2", "--dtype=float32"])
    path = tmp_path / "out" / config
    assert code == 0 and losses(path)[-1] < losses(path)[0]
    settings = read_json(path / "config.json")["settings"]
    assert settings["optimizer"] == {"finetune": "adamw", "sft": "muon"}[config]


def test_a_known_set_is_prepared_for_the_weights_unless_it_fits(run, tmp_path, monkeypatch):
    """The tokenizer counts, not its name: bpe:300 of one text is not that of another."""
    text = tmp_path / "known.txt"
    text.write_text("".join(f"{i} green bottles\n" for i in range(900)))
    monkeypatch.setitem(prepare.KNOWN, "known", prepare.Recipe(str(text), "bpe:300"))
    base = run("base", "--tokenizer=bpe:300")
    run("one", f"--init_from={base}", "--dataset=known")
    names = sorted(p.name for p in (tmp_path / "data").glob("known*"))
    assert len(names) == 1 and names[0] != "known"
    prepare.resolve("known")
    run("two", f"--init_from={base}", "--dataset=known")
    flags = ["--dataset=known", f"--out_dir={tmp_path / 'own'}"]
    assert train.main([str(tmp_path / "test.py"), *flags]) == 0
    run("three", f"--init_from={tmp_path / 'own'}", "--dataset=known")
    assert sorted(p.name for p in (tmp_path / "data").glob("known*")) == ["known", *names]


def test_a_run_killed_before_its_first_checkpoint_begins_with_its_weights_again(run, monkeypatch):
    base = run("base", "--max_iters=60", "--eval_interval=60")
    flags = [f"--init_from={base}", "--block_size=40", "--extend_positions=copy", "--freeze=wpe"]
    whole = run("whole", *flags)

    def killed(self):
        raise SystemExit(137)

    monkeypatch.setattr(train.Trainer, "save", killed)
    with pytest.raises(SystemExit):
        run("parts", *flags)
    monkeypatch.undo()
    assert (base.parent / "parts" / "config.json").exists()
    assert train.main([f"--out_dir={base.parent / 'parts'}"]) == 0
    ours, theirs = weights(whole), weights(base.parent / "parts")
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_run_from_scratch_killed_before_its_first_checkpoint_starts_again(run, monkeypatch):
    def killed(self):
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "save", killed)
        with pytest.raises(SystemExit):
            run("scratch", "--init_from=scratch", "--tokenizer=byte")
    path = run("whole").parent / "scratch"
    assert train.main([f"--out_dir={path}"]) == 0
    ours, theirs = weights(path), weights(path.parent / "whole")
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_the_first_command_goes_on_also_after_another_one_did(run, monkeypatch):
    """Of a run from weights, its folder alone goes on too; it does not forget where it began."""
    base = run("base")
    batches = train.Trainer.batches

    def stop_at(step: int) -> None:
        monkeypatch.setattr(train.Trainer, "batches", lambda self, first: (
            setattr(self.interrupt, "signal", 2 if self.progress.step == step else None),
            batches(self, first))[1])

    for step, again in ((2, [f"--init_from={base}"]), (4, ["--init_from=resume"])):
        stop_at(step)
        with pytest.raises(AssertionError):  # exit code 130
            run("tuned", *again)
    monkeypatch.setattr(train.Trainer, "batches", batches)
    path = run("tuned", f"--init_from={base}")
    assert len(losses(path)) == 8
    assert read_json(path / "config.json")["settings"]["init_from"] == str(base)


def test_another_spelling_of_the_source_is_the_same(run, tmp_path, monkeypatch):
    base = run("base", "--max_iters=2")
    monkeypatch.chdir(tmp_path)
    assert locate.same_place(str(base), "base") and not locate.same_place(None, "base")
    assert not locate.same_place(str(base), "elsewhere")


def test_a_run_whose_source_is_gone_is_shown_the_way(run, tmp_path):
    with pytest.raises(UserError, match="goes on without: python train.py --out_dir=RUN"):
        run("parts", f"--init_from={tmp_path / 'gone'}")
