"""Train a GPT.

    python train.py config/small.py                        about three minutes on a laptop
    python train.py config/small.py --dataset=my.txt       on your own text
    python train.py config/small.py --n_layer=6            any setting below is a flag

The same command again goes on with a run that was interrupted.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import utils

from data.dataset import Dataset
from data.prepare import prepares_for, resolve
from kit import checkpoint, optimizer
from kit import device as machine
from kit.errors import UserError, run
from kit.evaluate import eval_batches, evaluate
from kit.finetune import freeze
from kit.job import Job, say, start
from kit.progress import Progress
from kit.run import folders, locate, moments, store
from kit.run.failures import Interrupt, explained, last_good, skip_update
from kit.run.report import Report
from kit.settings import at_least, in_range, load
from model import GPT, GPTConfig


@dataclass
class TrainSettings:
    """Train a GPT. Names and defaults are nanoGPT's; what is ours is described where it stands."""

    # the run
    out_dir: str | None = None  # folder of the run; None: out/<name of the config file>
    init_from: str = "auto"  # auto, scratch, resume, gpt2, or the run or checkpoint to start from
    extend_positions: Literal["interpolate", "hierarchical", "copy"] | None = None  # its context
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
    gelu: Literal["tanh", "erf"] = "tanh"  # tanh is GPT-2's, erf the exact one
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
    freeze: str = ""  # what stays as it is: names or beginnings of parameters, as "wte wpe h.0"
    layer_lr_decay: float = 1.0  # each block learns this share of what the one above it does
    skip_spikes: float = 0.0  # skip updates of a norm so many times the usual; 0: none
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
    wandb_project: str | None = None  # its project; None: WANDB_PROJECT, or bonsaigpt
    wandb_run_name: str | None = None  # its name there; None: that of out_dir
    # the machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # under torchrun; fsdp shards the model
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # between processes; auto: nccl on GPUs
    timeout: float = 600.0  # seconds that processes wait for one another
    kernels: Literal["auto", "torch"] = "auto"  # torch: none of our own, PyTorch's alone
    compile: Literal["auto"] | bool = "auto"  # torch.compile; auto: on a GPU
    debug: bool = False  # show tracebacks of mistakes

    def check(self) -> None:
        """Refuse values out of range or at odds with each other; UserError names both."""
        at_least(self, 1, "batch_size gradient_accumulation_steps max_iters eval_interval keep "
                          "log_interval")
        at_least(self, 0, "seed warmup_iters patience eval_iters weight_decay grad_clip min_lr")
        in_range(self, 0, math.inf, "learning_rate muon_lr init_std")
        if not 0 < self.layer_lr_decay <= 1:
            raise UserError(f"layer_lr_decay={self.layer_lr_decay}: must be above 0, at most 1")
        in_range(self, 0, 1e7, "timeout")
        if not (self.skip_spikes == 0 or self.skip_spikes > 1):
            raise UserError(f"skip_spikes={self.skip_spikes}: must be 0 or above 1; inf skips only "
                            "what is not finite")
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
        """The architecture; what is no setting keeps the default that GPTConfig has for it."""
        names = {f.name for f in fields(GPTConfig)} & {f.name for f in fields(self)}
        try:
            return GPTConfig(vocab_size=vocab_size, **{n: getattr(self, n) for n in names})
        except ValueError as e:
            raise UserError(str(e)) from None


# a run can go on with other settings, but not with another one of these
ARCHITECTURE = {"optimizer", "freeze"} | (
    {f.name for f in fields(GPTConfig)} - {"dropout", "vocab_size"})


def main(argv: list[str]) -> int:
    loaded = load(TrainSettings, argv, "config/small.py", folders.settings_of)
    s = loaded.settings
    with start(s) as job:  # this process alone, or with the others that torchrun started
        source, data = job.main_first(lambda: open_data(s, loaded.given))
        job.same_everywhere({"data": data.hash, **asdict(s)}, but="out_dir device debug")
        machine.prepare_device(job.device)
        if s.eval_only:
            from kit.measure import evaluate_only

            return evaluate_only(s, source, data, job)
        run, dtypes, wanted = folders.begin(loaded, ARCHITECTURE, data, job)
        with machine.install_kernels(wanted, say) as own:
            trainer = Trainer(s, run, source, data, dtypes, own, job)
            if run.replaces and job.main:  # --overwrite: now that all else is known to work
                folders.clear(run.path)
            trainer.report.begin()
            with trainer.guard():
                trainer.loop()
            if trainer.progress.finished:
                trainer.report.conclude(trainer.model)
                return 0
        say(f"interrupted at step {trainer.progress.step}, saved. Go on with:\n"
            f"    {folders.command_to_go_on(loaded, run.path, job)}")
        return 128 + trainer.signal


def open_data(s: TrainSettings, given: set[str]) -> tuple[Path | None, Dataset]:
    """The checkpoint to take weights from, if any, and the data set.

    The data is prepared if need be, its shards checked and long enough for the context.
    """
    source, tokenizer = locate.find_source(s.init_from, say), s.tokenizer
    locate.adopt_architecture(s, given, source)
    theirs = source / "tokenizer.json" if source and tokenizer is None else None
    if theirs and prepares_for(s.dataset, theirs):
        tokenizer = str(theirs)
        s.dataset = resolve(s.dataset, tokenizer, say).name  # so it goes on without the source
    folder = resolve(s.dataset, tokenizer, say)
    data = Dataset(folder, tokenizer, s.align, s.long_samples, s.verify)
    for split in (data.train, data.val):
        split.require(s.block_size)
        if data.kind == "instruct":
            say(split.report(s.block_size, s.batch_size))
    if source:
        locate.same_tokenizer(source, data.tokenizer)
    return source, data


class Trainer:
    """Model, optimizers, data and progress, and the loop that moves them."""

    def __init__(self, s: TrainSettings, run: folders.Run, source: Path | None, data: Dataset,
                 dtypes: machine.Dtypes, own: machine.Kernels, job: Job):
        self.s, self.path, self.data, self.job = s, run.path, data, job
        self.rows = s.batch_size * s.gradient_accumulation_steps  # of an update
        self.autocast = partial(machine.autocast, job.device, dtypes.products)
        scaled = dtypes.products == torch.float16
        self.scaler = torch.amp.GradScaler(job.device.type, enabled=scaled)
        self.progress, self.interrupt, self.signal = Progress(), Interrupt(), 0
        self.writer = store.Writer()
        self.ahead: tuple[int, list] = (-1, [])  # the next update's first row and batches
        self.saved: tuple[int, bool] | None = None  # step and finished of the newest checkpoint
        torch.manual_seed(s.seed)
        self.model = GPT(s.model_config(data.vocab_size), s.init_std)
        if run.resume or source:
            folder = run.resume[0] if run.resume else source  # of a run, only rank 0 has it
            job.on_main(lambda: checkpoint.load_weights(
                self.model, folder / "model.safetensors", s.extend_positions, crop=not run.resume))
        freeze(self.model, s.freeze)
        own.take_loss(self.model)
        for name in own.wanted:  # what one rank lacks, none has
            if job.max(name not in own.names):
                own.drop(name, self.model)
        self.replica = job.wrap(self.model, scaled)  # what is called for a loss
        self.optimizers = optimizer.build_optimizers(self.model, s, dtypes.muon, job.muon)
        if run.resume:
            self.restore(*run.resume, run.over)
        elif source:
            say(f"starting from the weights of {source}")
        compiled = machine.compile_model(self.model, s.compile, self.autocast)
        self.report = Report(s, run, data, job, self.progress)
        self.report.introduce(self.model, dtypes, own, compiled)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What can befall a run: signals save it, a full disk or memory is explained in a line."""
        with self.interrupt, explained(self.path, self.s), self.writer:
            yield

    def restore(self, folder: Path | None, state: dict[str, Any], over: bool) -> None:
        """Take up a checkpoint exactly where it was left; rank 0 alone has the folder."""
        p = self.progress = Progress.from_state(state)
        self.saved = (p.step, p.finished)
        if over:  # it is to go on all the same
            p.worse = 0
        p.finished = p.last_eval == p.step and self.is_finished()
        tensors = checkpoint.load_tensors(folder / "optimizer.safetensors") if folder else {}
        moments.load_state(self.optimizers, self.model, self.job.broadcast(tensors),
                           self.job.shard)
        if state.get("scaler"):  # not where the run had another dtype
            self.scaler.load_state_dict(state["scaler"])
        say(f"going on with {self.path} from step {self.progress.step}")

    def loop(self) -> None:
        """Update, log, evaluate and save until the run is finished or interrupted."""
        s, p, job = self.s, self.progress, self.job
        while True:
            due = p.step > 0 and (p.step % s.eval_interval == 0 or p.step >= s.max_iters)
            if due and p.last_eval != p.step:
                try:
                    self.evaluate()
                except (OSError, MemoryError, RuntimeError):
                    if job.world == 1:  # what was trained is not lost with it
                        self.save()
                    raise
            p.finished = p.finished or (p.step >= s.max_iters and p.last_eval == p.step)
            self.signal = job.max(self.interrupt.signal)
            if p.finished or self.signal:
                break
            self.report.updated(self.update())
            self.writer.wait(block=False)  # only to hear of a full disk
        self.report.bar.close()
        if self.saved != (p.step, p.finished):
            weights = (job.whole(w.detach().sum()) for w in self.model.parameters())
            if not all(w.isfinite() for w in weights):
                self.give_up(p.step, "the weights are not finite")
            self.save()
        self.report.draw(0)

    def batches(self, first: int) -> list[list[torch.Tensor]]:
        """This rank's share of the update from row `first`: x, y (rows, T), T <= block_size."""
        job, s = self.job, self.s
        starts = [first + (i * job.world + job.rank) * job.micro_rows
                  for i in range(job.micro_steps)]
        return [[machine.to_device(a, job.device) for a in
                 self.data.train.batch(row, job.micro_rows, s.block_size, s.seed)]
                for row in starts]

    def update(self) -> dict[str, Any]:
        """One update of batch_size x gradient_accumulation_steps rows -> its line of the log."""
        s, p, job, began = self.s, self.progress, self.job, time.perf_counter()
        factor = optimizer.set_lr(self.optimizers, p.step, s)
        with p.timed("data"):
            batches = self.ahead[1] if self.ahead[0] == p.rows else self.batches(p.rows)
        with p.timed("forward and backward"):
            n_targets = sum((y >= 0).sum() for _, y in batches)
            n_targets = job.all_reduce(n_targets).clamp(min=1)  # of the whole update
            total = torch.zeros((), device=job.device)
            for i, (x, y) in enumerate(batches):
                # dropout is a function of seed, step and micro-step: no state to save
                micro = i * job.world + job.rank
                torch.manual_seed(((s.seed * 1000003 + p.step) * 1000003 + micro) % 2**63)
                with job.synchronize(self.replica, last=i == len(batches) - 1):
                    with self.autocast():
                        loss_sum, _ = self.replica(x, y)
                    # DDP and FSDP take the mean over ranks where a sum is wanted
                    self.scaler.scale(loss_sum / n_targets * job.world).backward()
                total += loss_sum.detach()
        with p.timed("data"):  # while a GPU is still at work
            ahead = p.rows + self.rows
            self.ahead = ahead, self.batches(ahead) if p.step + 1 < s.max_iters else []
        with p.timed("forward and backward"):
            for o in self.optimizers:
                self.scaler.unscale_(o)
            grads = [w.grad for w in self.model.parameters() if w.grad is not None]
            norm = job.whole(utils.get_total_norm(grads))
            loss, grad_norm, tokens = job.sum(
                (total / n_targets).item(), norm.item() if job.main else 0.0,
                sum(x.numel() for x, _ in batches))
        skip = skip_update(p, self.scaler, loss, grad_norm, s.skip_spikes, self.give_up, say)
        with p.timed("optimizer"):
            if 0 < s.grad_clip < grad_norm and not skip:
                utils.clip_grads_with_norm_(self.model.parameters(), s.grad_clip, norm)
            for o in self.optimizers:
                if not skip:
                    self.scaler.step(o)
                o.zero_grad(set_to_none=True)
            self.scaler.update()
        p.step, p.rows, p.tokens = p.step + 1, ahead, p.tokens + int(tokens)
        p.train_s += time.perf_counter() - began
        return {"step": p.step, "tokens": p.tokens, "loss": loss, "lr": s.learning_rate * factor,
                "grad_norm": grad_norm} | ({"skipped": True} if skip else {})

    def give_up(self, step: int, why: str) -> None:
        self.writer.wait()
        self.job.refuse(
            f"step {step}: {why}; {last_good(self.path)}. Try a lower learning_rate or muon_lr, a "
            "longer warm-up, skip_spikes=10, or dtype=float32")

    def evaluate(self) -> None:
        """Measure the validation split, log it, save, and decide whether the run is over."""
        s, p, job = self.s, self.progress, self.job
        batches = eval_batches(self.data.val, s.block_size, s.batch_size, s.eval_iters,
                               job.rank, job.world)
        with p.timed("evaluation"):
            result = evaluate(self.model, batches, self.data.token_byte_lengths(),
                              self.data.separator, self.autocast,
                              lambda: job.max(self.interrupt.signal) > 0, job.sum)
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
        p.finished = self.is_finished()
        self.report.evaluated(result, is_best)
        if s.always_save_checkpoint or is_best or p.finished:
            self.save()
        self.report.draw(30)

    def is_finished(self) -> bool:
        """Whether an evaluation at this step ends the run."""
        s, p = self.s, self.progress
        return p.step >= s.max_iters or bool(s.patience and p.worse >= s.patience)

    def save(self) -> None:
        """Copy all that a checkpoint holds and write it in the background."""
        with self.progress.timed("saving"):
            self.writer.wait()  # one copy at a time
            weights = self.job.snapshot(checkpoint.tensors_of(self.model))
            state = self.job.snapshot(moments.state_tensors(self.optimizers, self.model))
            self.saved = (self.progress.step, self.progress.finished)
            if not self.job.main:
                return
            about = {**asdict(self.progress), "scaler": self.scaler.state_dict(),
                     "threads": torch.get_num_threads(), "torch": torch.__version__,
                     "run": self.report.about}

            def write() -> None:
                store.save(self.path, self.model.config, weights, state,
                           self.data.tokenizer.to_json(), about, self.s.keep)
                locate.remember(self.path)

            self.writer.start(write)


if __name__ == "__main__":
    run(main)
