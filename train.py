"""Train a GPT.

    python train.py config/small.py                        about three minutes on a laptop
    python train.py config/small.py --dataset=my.txt       on your own text
    python train.py config/small.py --n_layer=6            any setting below is a flag

The same command again goes on with a run that was interrupted.
"""

import math
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import utils
from tqdm import tqdm

from data import DataError
from data.dataset import Dataset
from data.prepare import is_text, resolve
from kit import checkpoint, runs
from kit import device as machine
from kit.evaluate import eval_batches, evaluate, spell_loss
from kit.metrics import Log, Progress, Wandb, draw_loss, peak_memory, spell_time
from kit.optimizer import build_optimizers, load_optimizer_tensors, optimizer_tensors, set_lr
from kit.sampling import start_ids, write_text
from kit.settings import UserError, at_least, in_range, load, run
from model import GPT, GPTConfig

say = tqdm.write  # the bar stays below what is said


@dataclass
class TrainSettings:
    """Train a GPT. Names and defaults are nanoGPT's; what is ours is described where it stands."""

    # the run
    out_dir: str | None = None  # folder of the run; None: out/<name of the config file>
    init_from: str = "auto"  # auto, scratch, resume, or a run or checkpoint folder to start from
    overwrite: bool = False  # replace a run that is in out_dir
    seed: int = 1337  # of the initialisation, the order of the data and dropout
    # the data
    dataset: str = "openwebtext"  # a name, a text file, a folder of texts or of shards
    tokenizer: str | None = None  # for a text: byte, char, bpe:N or a tiktoken name; None: bpe:2048
    batch_size: int = 12  # rows of a micro-step
    gradient_accumulation_steps: int = 40  # micro-steps of an update
    align: Literal["off", "document"] | None = None  # rows begin with one; None: as prepared
    long_samples: Literal["drop", "truncate"] = "drop"  # instruction samples beyond the context
    verify: bool = False  # before the first update check all of the data, not a sample of it
    # the model
    block_size: int = 1024  # context, in tokens
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads in a block
    n_embd: int = 768  # width
    dropout: float = 0.0  # 0 for pretraining; small data wants 0.1 to 0.2
    bias: bool = False  # biases in Linear and LayerNorm, as GPT-2 has
    init_std: float = 0.02  # of the blocks' matrices; 0.02 suits width 768, less width wants more
    tie_embeddings: bool = True  # the output head is the token embedding
    attn_logn: Literal["off", "fixed", "clipped", "learned"] = "off"  # see model.py
    logn_base: int | None = None  # its base; None: 512 for fixed, block_size for clipped
    # the optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the hidden matrices
    learning_rate: float = 6e-4  # peak, AdamW
    muon_lr: float = 0.02  # peak, Muon
    muon_momentum: float = 0.95  # short runs do better with less: 0.85
    weight_decay: float = 1e-1  # of matrices and embeddings
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no limit
    # the schedule, in updates
    max_iters: int = 600000  # updates
    decay_lr: bool = True  # False: the learning rates stay at their peak from the first update on
    schedule: Literal["cosine", "linear"] = "cosine"  # linear: flat, then down over the cooldown
    cooldown: float = 0.6  # share of the run that schedule=linear spends going down
    warmup_iters: int = 2000  # updates in which the rate rises
    lr_decay_iters: int | None = None  # where it reaches its end; None: max_iters
    min_lr: float = 6e-5  # its end for AdamW; Muon falls by the same factor
    patience: int = 0  # stop after so many evaluations without a better one; 0: never
    # evaluating, logging and saving
    eval_interval: int = 2000  # updates between evaluations
    eval_iters: int = 0  # batches of an evaluation; 0: the whole validation split
    eval_only: bool = False  # evaluate the run, or init_from, and leave
    always_save_checkpoint: bool = True  # False: save at an evaluation only if it is the best
    keep: int = 2  # newest checkpoints that stay, beside the best
    log_interval: int = 1  # updates between lines of log.jsonl
    wandb_log: bool = False  # also log to Weights & Biases
    wandb_project: str = "bonsaigpt"  # its project
    wandb_run_name: str | None = None  # its name there; None: that of out_dir
    # the machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products
    compile: Literal["auto"] | bool = "auto"  # torch.compile; auto: on a GPU
    debug: bool = False  # show tracebacks of mistakes

    def check(self) -> None:
        """Refuse values out of range or at odds with each other; UserError names both."""
        at_least(self, 1, "batch_size gradient_accumulation_steps max_iters eval_interval keep "
                          "log_interval")
        at_least(self, 0, "seed warmup_iters patience eval_iters weight_decay grad_clip min_lr")
        in_range(self, 0, math.inf, "learning_rate muon_lr init_std")
        in_range(self, -1e-9, 1, "beta1 beta2 muon_momentum")
        in_range(self, 0, 1 + 1e-9, "cooldown")
        for name in ("dataset", "init_from", "out_dir", "tokenizer"):
            if getattr(self, name) == "":
                raise UserError(f"{name}: an empty text; leave it out to take the default")
        end = self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters
        if self.decay_lr and self.warmup_iters >= end:
            raise UserError(f"warmup_iters={self.warmup_iters} does not fit into the schedule, "
                            f"which ends at lr_decay_iters={end}")
        if self.decay_lr and self.min_lr > self.learning_rate:
            raise UserError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}")
        self.model_config(vocab_size=1)

    def model_config(self, vocab_size: int) -> GPTConfig:
        names = {f.name for f in fields(GPTConfig)} - {"vocab_size"}
        try:
            return GPTConfig(vocab_size=vocab_size, **{n: getattr(self, n) for n in names})
        except ValueError as e:
            raise UserError(str(e)) from None


# a run can go on with other settings, but not with another one of these
ARCHITECTURE = {f.name for f in fields(GPTConfig)} - {"dropout", "vocab_size"} | {"optimizer"}


def main(argv: list[str]) -> int:
    loaded = load(TrainSettings, argv, default_config="config/small.py")
    s, device = loaded.settings, machine.choose_device(loaded.settings.device)
    source = runs.find_source(s.init_from)
    if source:
        runs.adopt_architecture(s, checkpoint.load_config(source), loaded.given, source)
    data = open_data(s, source)
    machine.prepare_device(device)
    if s.eval_only:
        return evaluate_only(s, source, data, device)
    claimed = runs.claim(s.out_dir, loaded.files[-1].stem, s.init_from, s.overwrite, say)
    wanted = s.dtype
    if claimed.resume:
        runs.check_resume(claimed, asdict(s), ARCHITECTURE, data, say)
        wanted = runs.same_dtype(claimed, s.dtype, device.type)
    trainer = Trainer(s, claimed.path, data, device, machine.choose_dtype(wanted, device))
    if claimed.resume:
        trainer.restore(*claimed.resume)
    elif source:
        checkpoint.load_weights(trainer.model, source / "model.safetensors")
        say(f"starting from the weights of {source}")
    if claimed.replaces:
        runs.clear(claimed.path)
    trainer.introduce()
    with trainer.interrupt:
        trainer.loop()
    if trainer.progress.finished:
        trainer.conclude()
        return 0
    say(f"interrupted at step {trainer.progress.step}, saved. Go on with:\n"
        f"    {runs.command_to_go_on(loaded, claimed.path)}")
    return 128 + trainer.interrupt.signal


def open_data(s: TrainSettings, source: Path | None) -> Dataset:
    """The data set, prepared if need be, its shards checked and long enough for the context."""
    tokenizer = s.tokenizer
    if source and tokenizer is None and is_text(s.dataset):  # of one's own, for given weights
        tokenizer = str(source / "tokenizer.json")
    folder = resolve(s.dataset, tokenizer, say)
    data = Dataset(folder, tokenizer, s.align, s.long_samples, s.verify)
    for split in (data.train, data.val):
        split.require(s.block_size)
        if data.kind == "instruct":
            say(split.report(s.block_size, s.batch_size))
    if source:
        runs.same_tokenizer(source, data.tokenizer)
    return data


def evaluate_only(s: TrainSettings, source: Path | None, data: Dataset,
                  device: torch.device) -> int:
    """The loss of a checkpoint on the validation split; nothing is written."""
    folder = source or runs.find_checkpoint(runs.find_run(s.out_dir))
    runs.same_tokenizer(folder, data.tokenizer)
    model, _, state = checkpoint.load_model(folder)
    batches = eval_batches(data.val, model.config.block_size, s.batch_size, s.eval_iters)
    result = evaluate(model.to(device), batches, data.token_byte_lengths(), data.separator,
                      partial(machine.autocast, device, machine.choose_dtype(s.dtype, device)))
    say(f"{folder}, step {state['step']}: {spell_loss(result)}")
    return 0


class Trainer:
    """Model, optimizers, data and progress, and the loop that moves them."""

    def __init__(self, s: TrainSettings, path: Path, data: Dataset, device: torch.device,
                 dtype: torch.dtype):
        self.s, self.path, self.data, self.device, self.dtype = s, path, data, device, dtype
        torch.manual_seed(s.seed)
        self.model = GPT(s.model_config(data.vocab_size), s.init_std).to(device)
        self.optimizers = build_optimizers(self.model, s)
        self.autocast = partial(machine.autocast, device, dtype)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.progress, self.interrupt = Progress(), runs.Interrupt()
        self.ahead: tuple[int, list] = (-1, [])  # the next update's first row and batches
        self.saved: tuple[int, bool] | None = None  # step and finished of the newest checkpoint
        self.rows = s.batch_size * s.gradient_accumulation_steps  # of an update

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Take up a checkpoint exactly where it was left."""
        self.progress = Progress(**{k: state[k] for k in Progress.__annotations__ if k in state})
        self.saved = (self.progress.step, self.progress.finished)
        self.progress.finished = False
        checkpoint.load_weights(self.model, folder / "model.safetensors")
        tensors = checkpoint.load_tensors(folder / "optimizer.safetensors")
        load_optimizer_tensors(self.optimizers, self.model, tensors)
        self.scaler.load_state_dict(state["scaler"])
        say(f"going on with {self.path} from step {self.progress.step}")

    def introduce(self) -> None:
        """The first lines of a run; then everything is ready for the loop."""
        s, data, p = self.s, self.data, self.progress
        say(f"device: {machine.describe(self.device, self.dtype)}")
        compiled = machine.compile_model(self.model, s.compile, self.autocast)
        peak = machine.peak_flops(self.dtype, self.device)
        self.peak_tok_s = peak / self.model.flops_per_token()
        say(f"model: {self.model.num_params():,} parameters, {data.vocab_size:,} tokens "
            f"({data.tokenizer.spec}); compile {compiled}")
        say(f"update: {s.batch_size} rows x {s.block_size} tokens x "
            f"{s.gradient_accumulation_steps} micro-steps x 1 process "
            f"= {self.rows * s.block_size:,} tokens")
        epochs = s.max_iters * self.rows / data.train.epoch_rows(s.block_size)
        say(f"run: {s.max_iters:,} updates, {epochs:.2f} epochs of {data.train.n_tokens:,} tokens "
            f"of {data.folder.name}, in {self.path}")
        checkpoint.write_json(self.path / "config.json", {
            "settings": asdict(s), "device": self.device.type,
            "dtype": str(self.dtype).split(".")[1], "dataset_hash": data.hash})
        self.log = Log(self.path / "log.jsonl", p.step, p.last_eval)
        self.wandb = Wandb(s.wandb_log, s.wandb_project, s.wandb_run_name or self.path.name,
                           asdict(s), say)
        self.drawn = time.perf_counter()  # when the curve was drawn
        self.began = self.drawn - p.elapsed_s

    def loop(self) -> None:
        """Update, log, evaluate and save until the run is finished or interrupted."""
        s, p = self.s, self.progress
        bar = tqdm(total=s.max_iters, initial=p.step, unit="update", disable=None, smoothing=0.05)
        first, mark = p.step, (time.perf_counter(), p.tokens)
        while True:
            due = p.step > 0 and (p.step % s.eval_interval == 0 or p.step >= s.max_iters)
            if due and p.last_eval != p.step:
                self.evaluate()
                mark = time.perf_counter(), p.tokens
            p.finished = p.finished or (p.step >= s.max_iters and p.last_eval == p.step)
            if p.finished or self.interrupt.signal:
                break
            start = time.perf_counter()
            row = self.update()
            p.train_s += time.perf_counter() - start
            if p.step % s.log_interval == 0:
                tok_s = (p.tokens - mark[1]) / (time.perf_counter() - mark[0])
                mark = time.perf_counter(), p.tokens
                row |= {"tok_s": round(tok_s, 1), "mfu": round(tok_s / self.peak_tok_s, 4)}
                self.record(row)
                bar.set_postfix(loss=f"{row['loss']:.3f}", val=f"{p.val_loss or math.nan:.3f}",
                                tok_s=f"{tok_s:,.0f}", refresh=False)
            bar.update()
            if p.step == first + 5:  # the first updates are slow
                warm = p.train_s
            if p.step == first + 15:
                left = (p.train_s - warm) / 10 * (s.max_iters - p.step)
                say(f"about {spell_time(left)} of training left")
        bar.close()
        if self.saved != (p.step, p.finished):
            if not all(w.isfinite().all() for w in self.model.parameters()):
                self.give_up(p.step, "the weights are not finite")
            self.save(is_best=False)
        draw_loss(self.log.rows, self.path / "loss.png", self.path.name)
        self.wandb.finish()

    def batches(self, first: int) -> list[list[torch.Tensor]]:
        """The micro-steps of the update from row `first`: x, y (batch_size, T), T <= block_size."""
        return [[machine.to_device(a, self.device) for a in
                 self.data.train.batch(row, self.s.batch_size, self.s.block_size, self.s.seed)]
                for row in range(first, first + self.rows, self.s.batch_size)]

    def update(self) -> dict[str, Any]:
        """One update of batch_size x gradient_accumulation_steps rows -> its line of the log."""
        s, p = self.s, self.progress
        factor = set_lr(self.optimizers, p.step, s)
        with p.timed("data"):
            batches = self.ahead[1] if self.ahead[0] == p.rows else self.batches(p.rows)
        with p.timed("forward and backward"):
            n_targets = sum((y >= 0).sum() for _, y in batches).clamp(min=1)  # of the whole update
            total = torch.zeros((), device=self.device)
            for micro, (x, y) in enumerate(batches):
                if s.dropout:  # a function of seed, step and micro-step: no state to save
                    torch.manual_seed(((s.seed * 1000003 + p.step) * 1000003 + micro) % 2**63)
                with self.autocast():
                    loss_sum, _ = self.model(x, y)
                self.scaler.scale(loss_sum / n_targets).backward()
                total += loss_sum.detach()
        row, tokens = p.rows + self.rows, p.tokens + sum(x.numel() for x, _ in batches)
        with p.timed("data"):  # while a GPU is still at work
            self.ahead = row, self.batches(row) if p.step + 1 < s.max_iters else []
        with p.timed("forward and backward"):
            for o in self.optimizers:
                self.scaler.unscale_(o)
            norm = utils.get_total_norm([w.grad for w in self.model.parameters()])
            loss, grad_norm = (total / n_targets).item(), norm.item()
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or self.scaler.is_enabled()):
            self.give_up(p.step + 1, f"the loss is {loss}, the gradient norm {grad_norm}")
        with p.timed("optimizer"):
            if 0 < s.grad_clip < grad_norm:
                utils.clip_grads_with_norm_(self.model.parameters(), s.grad_clip, norm)
            for o in self.optimizers:
                self.scaler.step(o)
                o.zero_grad(set_to_none=True)
            self.scaler.update()
        p.step, p.rows, p.tokens = p.step + 1, row, tokens
        return {"step": p.step, "tokens": p.tokens, "loss": loss, "lr": s.learning_rate * factor,
                "grad_norm": grad_norm}

    def give_up(self, step: int, why: str) -> None:
        last = checkpoint.pointed(self.path, "latest")
        raise UserError(f"step {step}: {why}; the last good checkpoint is "
                        f"{self.path / 'ckpt' / last if last else 'not there yet'}. Try a lower "
                        "learning_rate or muon_lr, a longer warm-up, or dtype=float32")

    def evaluate(self) -> None:
        """Measure the validation split, log it, save, and decide whether the run is over."""
        s, p = self.s, self.progress
        batches = eval_batches(self.data.val, s.block_size, s.batch_size, s.eval_iters)
        with p.timed("evaluation"):
            result = evaluate(self.model, batches, self.data.token_byte_lengths(),
                              self.data.separator, self.autocast,
                              lambda: self.interrupt.signal is not None)
        if result is None:  # interrupted; the next start makes up for it
            return
        if not math.isfinite(result["loss"]):
            self.give_up(p.step, f"the validation loss is {result['loss']}")
        p.val_loss, p.val_bpb, p.last_eval = result["loss"], result["bpb"], p.step
        is_best = p.best_loss is None or p.val_loss < p.best_loss
        if is_best:
            p.best_step, p.best_loss, p.best_bpb, p.worse = p.step, p.val_loss, p.val_bpb, 0
        else:
            p.worse += 1
        p.finished = p.step >= s.max_iters or bool(s.patience and p.worse >= s.patience)
        self.record({"step": p.step, "tokens": p.tokens, "val_loss": p.val_loss,
                     "val_bpb": p.val_bpb})
        best = "best so far, " if is_best else ""
        say(f"step {p.step:,}: {spell_loss(result)}, {best}{spell_time(p.elapsed_s)}")
        if s.always_save_checkpoint or is_best or p.finished:
            self.save(is_best)
        if time.perf_counter() - self.drawn > 30:
            draw_loss(self.log.rows, self.path / "loss.png", self.path.name)
            self.drawn = time.perf_counter()

    def record(self, row: dict[str, Any]) -> None:
        p = self.progress
        p.elapsed_s = time.perf_counter() - self.began
        row |= {"elapsed_s": round(p.elapsed_s, 3), "train_s": round(p.train_s, 3)}
        self.log.write(row)
        self.wandb.log(row)

    def save(self, is_best: bool) -> None:
        state = {**asdict(self.progress), "scaler": self.scaler.state_dict(),
                 "threads": torch.get_num_threads(), "torch": torch.__version__}
        with self.progress.timed("saving"):
            checkpoint.save(self.path, self.model, optimizer_tensors(self.optimizers, self.model),
                            self.data.tokenizer.to_json(), state, self.s.keep, is_best)
            runs.remember(self.path)
        self.saved = (self.progress.step, self.progress.finished)

    def conclude(self) -> None:
        """The last lines of a run, and what the model writes."""
        p = self.progress
        p.elapsed_s = time.perf_counter() - self.began
        if p.best_loss is not None:
            say(f"best: step {p.best_step:,}, validation loss {p.best_loss:.4f}, "
                f"{p.best_bpb:.4f} bits per byte; last {p.val_loss:.4f}, {p.val_bpb:.4f}")
        tok_s = p.tokens / max(p.train_s, 1e-9)
        say(f"{p.tokens:,} tokens in {spell_time(p.train_s)} of training, {tok_s:,.0f} tokens/s, "
            f"{tok_s / self.peak_tok_s:.0%} of what one large product would allow (MFU)")
        say(f"{spell_time(p.elapsed_s)} in all: {p.shares()}")
        say(f"peak memory {peak_memory(self.device.type) / 2**20:,.0f} MiB")
        best = checkpoint.pointed(self.path, "best") or checkpoint.pointed(self.path, "latest")
        say(f"checkpoint: {self.path / 'ckpt' / best}\ncurve: {self.path / 'loss.png'}")
        say(f"a sample:\n{'-' * 80}\n{self.sample()}\n{'-' * 80}\n"
            'write more with: python sample.py --prompt "..."')

    def sample(self) -> str:
        """What the model writes by itself, or answers to a held-out sample."""
        data, start, end = self.data, start_ids(self.data.tokenizer), None
        if data.kind == "instruct":
            start, end = data.val.prompt(0), data.separator
        return write_text(self.model, data.tokenizer, start, end, self.s.seed)


if __name__ == "__main__":
    run(main, mistakes=(DataError,))
