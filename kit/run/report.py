"""What a run tells, on rank 0 alone: first lines, log.jsonl, wandb, the curve, last lines."""

import math
import time
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from kit import device as machine
from kit.evaluate import spell_loss
from kit.files import write_json
from kit.job import Job, say
from kit.progress import Progress, spell_time
from kit.run import store
from kit.run.folders import Run
from kit.run.log import Log
from kit.writing.recompute import settle
from kit.writing.text import start_ids, write_sample
from model import GPT


class Report:
    """The voice of a run. data is its data set, progress what moves while it trains."""

    def __init__(self, s: Any, run: Run, data: Any, job: Job, progress: Progress):
        self.s, self.data, self.job, self.progress = s, data, job, progress
        self.path = run.path
        self.before = (run.resume[1].get("run") if run.resume else None) or {}  # what was said then
        self.drawn = time.perf_counter()  # when the curve was drawn
        self.began = self.drawn - progress.elapsed_s
        self.peak_tok_s, self.wandb = math.inf, None
        self.about: dict[str, Any] = {}  # what config.json holds, and each checkpoint too

    def introduce(self, model: GPT, dtypes: machine.Dtypes, own: machine.Kernels,
                  compiled: str) -> None:
        """The first lines. Nothing is written before `begin`."""
        if not self.job.main:
            return
        s, data, job, device = self.s, self.data, self.job, self.job.device
        say(f"device: {machine.describe(device, dtypes)}")
        peak = job.world * machine.peak_flops(dtypes.products, device)
        self.peak_tok_s = peak / machine.flops_per_token(model)
        still = sum(w.numel() for w in model.parameters() if not w.requires_grad)
        frozen = f" ({still:,} of them frozen)" if still else ""
        say(f"model: {model.num_params():,} parameters{frozen}, {data.vocab_size:,} tokens "
            f"({data.tokenizer.spec}); kernels {', '.join(own.names) or 'of PyTorch'}; compile "
            f"{compiled}")
        rows = s.batch_size * s.gradient_accumulation_steps
        processes = "1 process" if job.world == 1 else f"{job.world} processes ({job.parallel})"
        say(f"update: {job.micro_rows} rows x {s.block_size} tokens x {job.micro_steps} "
            f"micro-steps x {processes} = {rows * s.block_size:,} tokens")
        epochs = s.max_iters * rows / data.train.epoch_rows(s.block_size)
        say(f"run: {s.max_iters:,} updates, {epochs:.2f} epochs of {data.train.n_tokens:,} tokens "
            f"of {data.folder.name}, in {self.path}")
        began = self.before.get("settings", {}).get("init_from", s.init_from)
        self.about = {
            "settings": asdict(s) | {"init_from": began},  # whatever command goes on with it
            "device": device.type, "launch": job.launch,
            "dtype": machine.name_of(dtypes.products),
            "muon_dtype": dtypes.muon and machine.name_of(dtypes.muon),
            "kernels": [*own.names], "kernels_lost": self.kernels_lost(own),
            "dataset_hash": data.hash, "over": False}

    def kernels_lost(self, own: machine.Kernels) -> list[dict[str, Any]]:
        """What the run had before and has not any more, with the steps; a new loss is said."""
        known = self.before.get("kernels_lost") or []
        lost = [n for n in self.before.get("kernels", ()) if n not in own.names]
        here = self.before.get("device", "cpu") == self.job.device.type
        if not (lost and here and self.s.kernels == "auto"):
            return known
        say(f"note: {', '.join(lost)}: kernels that the run had are not to be had now; it goes on "
            "with PyTorch's, and the last bits will differ")
        return [*known, {"step": self.progress.step, "kernels": lost}]

    def begin(self) -> None:
        """Write config.json; open the log, wandb and the bar."""
        p, main = self.progress, self.job.main
        self.first, self.mark = p.step, (p.train_s, p.tokens)
        self.bar = tqdm(total=self.s.max_iters, initial=p.step, unit="update", smoothing=0.05,
                        disable=None if main else True)
        if not main:
            return
        self.about |= {"wandb_id": self.before.get("wandb_id")}
        if self.s.wandb_log:
            from kit.run.wandb_log import Wandb

            self.wandb = Wandb(self.about["settings"], self.path.name, self.about["wandb_id"], say)
            self.about |= {"wandb_id": self.wandb.id}
        write_json(self.path / "config.json", self.about)
        self.log = Log(self.path / "log.jsonl", p.step, p.last_eval)

    def updated(self, row: dict[str, Any]) -> None:
        """A line of the log every log_interval updates; the bar; the time left, once that is known.

        row: what Trainer.update returns.
        """
        s, p = self.s, self.progress
        if p.step % s.log_interval == 0:
            tok_s = (p.tokens - self.mark[1]) / (p.train_s - self.mark[0])
            self.mark = p.train_s, p.tokens
            row |= {"tok_s": round(tok_s, 1), "mfu": round(tok_s / self.peak_tok_s, 4)}
            self.record(row)
            val = f"{p.val_loss:.3f}" if p.val_loss else "-"
            self.bar.set_postfix(loss=f"{row['loss']:.3f}", val=val, tok_s=int(tok_s),
                                 refresh=False)
        self.bar.update()
        if p.step == self.first + 5:  # the first updates are slow
            self.warm = p.train_s
        if p.step == self.first + 15:
            left = (p.train_s - self.warm) / 10 * (s.max_iters - p.step)
            say(f"about {spell_time(left)} of training left")

    def evaluated(self, result: dict[str, float], is_best: bool) -> None:
        """A line of the log and one for the person, of what kit.evaluate.evaluate returned."""
        p = self.progress
        self.record({"step": p.step, "tokens": p.tokens, "val_loss": p.val_loss,
                     "val_bpb": p.val_bpb})
        best = "best so far, " if is_best else ""
        say(f"step {p.step:,}: {spell_loss(result)}, {best}{spell_time(p.elapsed_s)}")

    def record(self, row: dict[str, Any]) -> None:
        """A line of the log."""
        p = self.progress
        p.elapsed_s = time.perf_counter() - self.began
        row |= {"elapsed_s": round(p.elapsed_s, 3), "train_s": round(p.train_s, 3)}
        if self.job.main:
            self.log.write(row)
            if self.wandb:
                self.wandb.log(row)

    def draw(self, after: float) -> None:
        """The curve, if the last one is `after` seconds old."""
        if self.job.main and time.perf_counter() - self.drawn >= after:
            from kit.plot import draw, read_curve

            curve = read_curve(self.log.path, self.path.name, "step", "loss")
            draw([curve], self.path / "loss.png", "step", "loss", title=self.path.name)
            self.drawn = time.perf_counter()

    def conclude(self, model: GPT) -> None:
        """The last lines, and what the model writes, where a process has all of it."""
        if not self.job.main:
            return
        if self.wandb:
            self.wandb.finish()
        p = self.progress
        p.elapsed_s = time.perf_counter() - self.began
        for line in p.closing(self.peak_tok_s, self.job.device.type):
            say(line)
        write_json(self.path / "config.json", self.about | {"over": True})
        best = store.pointed(self.path, "best") or store.pointed(self.path, "latest")
        say(f"checkpoint: {self.path / 'ckpt' / best}\ncurve: {self.path / 'loss.png'}")
        if self.job.parallel != "fsdp":
            say(f"a sample:\n{'-' * 80}\n{self.sample(model)}\n{'-' * 80}")
        say('write more with: python sample.py --prompt "..."')

    def sample(self, model: GPT) -> str:
        """What the model writes by itself, or answers to a held-out sample."""
        settle(model.eval())
        data, start, end = self.data, start_ids(self.data.tokenizer), None
        if data.kind == "instruct":
            start, end = data.val.prompt(0), data.separator
        return write_sample(model, data.tokenizer, start, end, self.s.seed)
