"""What people change in model.py is what writes: many edits, each made in a copy and compared.

The edits look for what a line does, not for how it is spelled: a pattern is a piece of Python in
which `_x` stands for anything, `*_xs` and `**_xs` for the remaining arguments.
"""

import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

CLONE = Path(__file__).parents[2]
Found = dict[str, Any]  # what each `_x` of a pattern stands for

# ------------------------------------------------------------------------------ patterns in Python


def match(pattern: Any, node: Any, found: Found) -> bool:
    """Whether a node is what a pattern describes; what `_x` and the like stand for is noted."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_"):
        return bind(pattern.id, node, found)
    if isinstance(pattern, str) and pattern.startswith("_") and not pattern.endswith("__"):
        return bind(pattern, node, found)  # a name: of an attribute, say
    if isinstance(pattern, list):
        return isinstance(node, list) and match_all(pattern, node, found)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            match(getattr(pattern, field), getattr(node, field), found)
            for field in pattern._fields if field != "ctx")
    return pattern == node


def match_all(patterns: list, nodes: list, found: Found) -> bool:
    """The same for a list, of which a last `*_xs` or `**_xs` takes what is left."""
    if rest := patterns and name_of_rest(patterns[-1]):
        patterns = patterns[:-1]
        if len(nodes) < len(patterns) or not bind(rest, nodes[len(patterns):], found):
            return False
        nodes = nodes[: len(patterns)]
    return len(patterns) == len(nodes) and all(
        match(p, n, found) for p, n in zip(patterns, nodes, strict=True))


def name_of_rest(node: Any) -> str:
    """'_xs' for `*_xs` and for `**_xs`, else ''."""
    starred = isinstance(node, ast.Starred) or isinstance(node, ast.keyword) and node.arg is None
    value = node.value if starred else None
    return value.id if isinstance(value, ast.Name) and value.id.startswith("_") else ""


def bind(name: str, value: Any, found: Found) -> bool:
    """Note what a name stands for; False if it already stands for something else."""
    def shown(x: Any) -> Any:
        return [shown(y) for y in x] if isinstance(x, list) else \
            ast.dump(x) if isinstance(x, ast.AST) else x

    return shown(found.setdefault(name, value)) == shown(value)


class Fill(ast.NodeTransformer):
    """Puts into a template what the names of a pattern stand for."""

    def __init__(self, found: Found):
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.found.get(node.id, node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self.found.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = self.spliced(node.args)
        node.keywords = self.spliced(node.keywords)
        return self.generic_visit(node)

    def spliced(self, nodes: list) -> list:
        found = []
        for node in nodes:
            rest = name_of_rest(node)
            found += copy.deepcopy(self.found[rest]) if rest in self.found else [node]
        return found


class Replace(ast.NodeTransformer):
    """Replaces each piece of a tree that a pattern describes by a template."""

    def __init__(self, pattern: str, template: str):
        self.pattern, self.template, self.times = statement(pattern), template, 0
        if isinstance(self.pattern, ast.Expr):
            self.pattern = self.pattern.value

    def visit(self, node: ast.AST) -> Any:
        found: Found = {}
        if not match(self.pattern, node, found):
            return self.generic_visit(node)
        self.times += 1
        made = [Fill(found).visit(n) for n in ast.parse(self.template).body]
        return made[0].value if isinstance(node, ast.expr) else made


def statement(text: str) -> ast.stmt:
    [only] = ast.parse(text).body
    return only


def pieces(tree: ast.AST, pattern: str) -> Iterator[tuple[ast.AST, Found]]:
    """Each piece of a tree that a pattern describes, with what its names stand for."""
    wanted = statement(pattern)
    wanted = wanted.value if isinstance(wanted, ast.Expr) else wanted
    for node in ast.walk(tree):
        found: Found = {}
        if match(wanted, node, found):
            yield node, found


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of its parameters after self."""
    return [a.arg for a in function.args.args][1:]


class Model:
    """The clone's model.py as a tree, whose parts are found by what they do."""

    def __init__(self) -> None:
        self.tree = ast.parse((CLONE / "model.py").read_text(encoding="utf-8"))
        self.attention = self.class_with("F.scaled_dot_product_attention(*_a, **_k)")
        self.mlp = self.class_with("nn.Linear(_i, 4 * _c, *_a, **_k)")
        self.block = self.class_with(f"self._part = {self.attention.name}(*_a, **_k)")
        self.gpt = self.class_called("GPT")

    def class_with(self, pattern: str) -> ast.ClassDef:
        return next(c for c in self.classes() if any(pieces(c, pattern)))

    def class_called(self, name: str) -> ast.ClassDef:
        return next(c for c in self.classes() if c.name == name)

    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]

    def replace(self, part: ast.AST, pattern: str, template: str, times: int | None = None) -> None:
        """Replace in a part what a pattern describes: so many times, or at least once."""
        replace = Replace(pattern, template)
        replace.visit(part)
        assert replace.times if times is None else replace.times == times, pattern

    def before_classes(self, text: str) -> None:
        """Add functions, classes or imports."""
        at = self.tree.body.index(self.classes()[0])
        self.tree.body[at:at] = ast.parse(text).body

    def construct(self, part: ast.ClassDef, text: str) -> None:
        """Add to __init__, behind the call of that of nn.Module; `config` is its configuration."""
        body = method(part, "__init__").body
        at = next(i for i, s in enumerate(body) if any(pieces(s, "super().__init__()")))
        body[at + 1 : at + 1] = ast.parse(text).body

    def field(self, text: str) -> None:
        """Add a field to GPTConfig."""
        body = self.class_called("GPTConfig").body
        at = max(i for i, s in enumerate(body) if isinstance(s, ast.AnnAssign))
        body.insert(at + 1, statement(text))

    def heads(self) -> tuple[str, ...]:
        """What the attention calls q, k, v and its parameters x, pos, mask and store."""
        forward = method(self.attention, "forward")
        [(_, found)] = pieces(forward, "F.scaled_dot_product_attention(_q, _k, _v, *_a, **_o)")
        return *(found[n].id for n in ("_q", "_k", "_v")), *parameters(forward)[:4]

    def before_storing(self, text: str) -> None:
        """Add to the attention, where q, k, v (B, H, T, D) are there and not in the cache yet."""
        body, store = method(self.attention, "forward").body, self.heads()[-1]
        at = next(i for i, s in enumerate(body) if any(pieces(s, f"{store}(*_a)")))
        body[at:at] = ast.parse(text).body

    def rename(self, names: dict[str, str]) -> None:
        """Rename attributes, also where they are the beginning of a text such as "wte.weight"."""
        renamed = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and node.attr in names:
                renamed.add(node.attr)
                node.attr = names[node.attr]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                first, dot, rest = node.value.partition(".")
                if first in names and dot and " " not in rest:
                    node.value = names[first] + dot + rest
        assert renamed == names.keys()

    def text(self) -> str:
        return ast.unparse(ast.fix_missing_locations(self.tree)) + "\n"


# ----------------------------------------------------------------------------------------- edits


@dataclass
class Edit:
    make: Callable[[Model], None]
    same: bool  # whether the model computes what it did before


EDITS: dict[str, Edit] = {}


def edit(same: bool = False) -> Callable:
    def add(make: Callable[[Model], None]) -> Callable[[Model], None]:
        EDITS[make.__name__] = Edit(make, same)
        return make

    return add


def edited(name: str) -> str:
    """The text of model.py after an edit, which must have changed something."""
    model = Model()
    before = model.text()
    EDITS[name].make(model)
    after = model.text()
    assert after != before
    return after


ADDED = "_x + self._f(self._n(_y), *_r)"  # a branch of a block and the stream it is added to
EMBEDDED = "self._t(_i) + self._p(_j)"  # tokens and positions
SDPA = "F.scaled_dot_product_attention(_q, _k, _v, _m, _d, **_o)"
GELU = "F.gelu(_h, *_a, **_k)"
UP = "nn.Linear(_i, 4 * _c, **_k)"


@edit()
def wider_mlp(m: Model) -> None:
    m.replace(m.mlp, "4 * _c", "6 * _c", 2)


@edit()
def swiglu_apart(m: Model) -> None:
    m.construct(m.mlp, "self.gate = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)")
    m.replace(m.mlp, "F.gelu(self._f(_x), *_a, **_k)", "F.silu(self.gate(_x)) * self._f(_x)", 1)


@edit()
def swiglu_packed(m: Model) -> None:
    m.before_classes("def swiglu(x):\n    a, b = x.chunk(2, dim=-1)\n    return F.silu(a) * b")
    m.replace(m.mlp, UP, "nn.Linear(_i, 8 * _c, **_k)", 1)
    m.replace(m.mlp, GELU, "swiglu(_h)", 1)


@edit()
def relu_squared(m: Model) -> None:
    m.replace(m.mlp, GELU, "F.relu(_h).square()", 1)


@edit()
def gelu_as_a_module(m: Model) -> None:
    m.construct(m.mlp, "self.act = nn.GELU()")
    m.replace(m.mlp, GELU, "self.act(_h)", 1)


@edit()
def rms_norm_as_a_module(m: Model) -> None:
    m.replace(m.tree, "nn.LayerNorm(_c, **_k)", "nn.RMSNorm(_c)", 3)


@edit()
def rms_norm_as_a_function(m: Model) -> None:
    norms = [found["_n"] for _, found in pieces(m.tree, "self._n = nn.LayerNorm(_c, **_k)")]
    for name in norms:
        m.replace(m.tree, f"self.{name} = nn.LayerNorm(_c, **_k)", "", 1)
        m.replace(m.tree, f"self.{name}(_x)", "F.rms_norm(_x, _x.shape[-1:])")


@edit()
def a_norm_of_ones_own(m: Model) -> None:
    m.before_classes("""
class Norm(nn.Module):
    def __init__(self, width, bias=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), None

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + 1e-5)
""")
    m.replace(m.tree, "nn.LayerNorm(_c, **_k)", "Norm(_c, **_k)", 3)


@edit()
def norm_after_the_branches(m: Model) -> None:
    m.replace(m.block, ADDED, "self._n(_x + self._f(_y, *_r))", 2)


@edit()
def norms_around_the_branches(m: Model) -> None:
    m.construct(m.block, "self.after = nn.LayerNorm(config.n_embd, bias=config.bias)")
    m.replace(m.block, ADDED, "_x + self.after(self._f(self._n(_y), *_r))", 2)


@edit()
def attention_and_mlp_side_by_side(m: Model) -> None:
    (_, first), (_, second) = pieces(m.block, ADDED)
    forward, x = method(m.block, "forward"), parameters(method(m.block, "forward"))[0]
    made = "return _x + self._f(self._n(_x), *_r)"
    both = Fill({**first, "_x": ast.Name(x)}).visit(statement(made))
    added = Fill({**second, "_n": first["_n"], "_x": ast.Name(x)}).visit(
        statement("self._f(self._n(_x))"))
    both.value = ast.BinOp(both.value, ast.Add(), added.value)
    forward.body = [both]


@edit()
def query_and_key_norm(m: Model) -> None:
    q, k, *_ = m.heads()
    m.before_storing(f"{q}, {k} = (3 * F.rms_norm(a, a.shape[-1:]) for a in ({q}, {k}))")


ROTATE = """
def rotate(x, pos):
    half = x.size(-1) // 2
    angle = pos[..., None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
    angle = angle.view(-1, 1, pos.size(-1), half)
    cos, sin, a, b = angle.cos(), angle.sin(), x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
"""


@edit()
def rotary_added_to_positions(m: Model) -> None:
    q, k, _, _, pos, *_ = m.heads()
    m.before_classes(ROTATE)
    m.before_storing(f"{q}, {k} = rotate({q}, {pos}), rotate({k}, {pos})")


@edit()
def rotary_in_place_of_positions(m: Model) -> None:
    rotary_added_to_positions(m)
    [(_, found)] = pieces(m.gpt, EMBEDDED)
    m.replace(m.gpt, f"self.{found['_p']} = _e", "", 1)
    m.replace(m.gpt, EMBEDDED, "self._t(_i)", 1)


@edit()
def rotary_from_a_table(m: Model) -> None:  # which is indexed as if all rows were alike
    q, k, _, _, pos, *_ = m.heads()
    m.construct(m.attention, """
half = config.n_embd // config.n_head // 2
angle = torch.arange(config.block_size)[:, None] * 100.0 ** (-torch.arange(half) / half)
self.register_buffer("cos", angle.cos(), persistent=False)
self.register_buffer("sin", angle.sin(), persistent=False)
""")
    m.before_classes("""
def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
""")
    table = f"self.cos[{pos}], self.sin[{pos}]"
    m.before_storing(f"{q}, {k} = rotate({q}, {table}), rotate({k}, {table})")


@edit(same=True)
def attention_with_a_mask_by_hand(m: Model) -> None:  # for as many keys in each row
    m.before_classes("""
def by_hand(q, k, v):
    w = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    T, S = w.shape[-2:]
    past = torch.ones(T, S, dtype=torch.bool, device=w.device).tril(S - T)
    return w.masked_fill(~past, -torch.inf).softmax(dim=-1) @ v
""")
    m.replace(m.attention, SDPA, "by_hand(_q, _k, _v)", 1)


DISTANCE = """
def distance(self, pos, S):
    return (pos[..., None] - torch.arange(S, device=pos.device)).view(-1, 1, pos.size(-1), S)
"""


@edit()
def bias_by_distance(m: Model) -> None:  # ALiBi
    *_, pos, _, _ = m.heads()
    m.attention.body += ast.parse(DISTANCE + """
def alibi(self, pos, S):
    far = self.distance(pos, S)
    slopes = 2.0 ** -torch.arange(self.n_head, device=pos.device).view(1, -1, 1, 1)
    return (-slopes * far).masked_fill(far < 0, -torch.inf)
""").body
    m.replace(m.attention, SDPA, "F.scaled_dot_product_attention(_q, _k, _v, "
              f"self.alibi({pos}, _k.size(2)), _d)", 1)


@edit()
def window_of_attention(m: Model) -> None:
    *_, pos, _, _ = m.heads()
    m.attention.body += ast.parse(DISTANCE + """
def near(self, pos, S):
    far = self.distance(pos, S)
    return (far >= 0) & (far < 6)
""").body
    m.replace(m.attention, SDPA, "F.scaled_dot_product_attention(_q, _k, _v, "
              f"self.near({pos}, _k.size(2)), _d)", 1)


def share_keys(m: Model, heads: int) -> None:
    m.field(f"n_kv_head: int = {heads}")
    m.construct(m.attention, """
if config.n_head % config.n_kv_head:
    raise ValueError(f"n_head={config.n_head} is not a multiple of n_kv_head={config.n_kv_head}")
self.kv_width = config.n_kv_head * (config.n_embd // config.n_head)
self.head_width = config.n_embd // config.n_head
""")
    m.replace(m.attention, "nn.Linear(_i, 3 * _c, **_k)",
              "nn.Linear(_i, _c + 2 * self.kv_width, **_k)", 1)
    m.replace(m.attention, "_y.split(_c, dim=_d)",
              "_y.split([_c, self.kv_width, self.kv_width], dim=_d)", 1)
    m.replace(m.attention, "_a.view(_b, _t, self._n, -1)", "_a.view(_b, _t, -1, self.head_width)",
              1)
    m.replace(m.attention, SDPA, "F.scaled_dot_product_attention(_q, _k, _v, _m, _d, "
              "enable_gqa=True, **_o)", 1)


@edit()
def grouped_queries(m: Model) -> None:
    share_keys(m, 2)


@edit()
def one_key_for_all_queries(m: Model) -> None:
    share_keys(m, 1)


@edit()
def limit_of_the_logits(m: Model) -> None:
    logits = method(m.gpt, "logits")
    m.replace(logits, "return _x", "return 5 * torch.tanh(_x / 5)", 1)


@edit()
def limit_of_the_logits_in_forward(m: Model) -> None:  # as in a nanoGPT
    forward = method(m.gpt, "forward")
    x = parameters(method(m.gpt, "logits"))[0]
    m.replace(forward, f"self.logits({x})", f"5 * torch.tanh(self.logits({x}) / 5)", 1)


@edit()
def a_bias_of_the_logits_in_forward(m: Model) -> None:
    forward = method(m.gpt, "forward")
    x = parameters(method(m.gpt, "logits"))[0]
    m.construct(m.gpt, "self.bias = nn.Parameter(torch.zeros(config.vocab_size))")
    m.replace(forward, f"self.logits({x})", f"self.logits({x}) + 5 * self.bias", 1)


@edit()
def limit_of_the_attention(m: Model) -> None:
    m.before_classes(BY_HAND.replace("WEIGHTS", "2 * torch.tanh(w / 2)"))
    m.replace(m.attention, "F.scaled_dot_product_attention(*_a, **_k)", "by_hand(*_a, **_k)", 1)


BY_HAND = """
def by_hand(q, k, v, mask, p, is_causal):
    w = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    w = WEIGHTS
    if is_causal:
        mask = torch.ones(w.shape[-2:], dtype=torch.bool, device=w.device).tril()
    if mask is not None:
        w = w.masked_fill(~mask, -torch.inf)
    return F.dropout(w.softmax(dim=-1), p) @ v
"""


@edit(same=True)
def attention_by_hand(m: Model) -> None:
    m.before_classes(BY_HAND.replace("WEIGHTS", "w"))
    m.replace(m.attention, "F.scaled_dot_product_attention(*_a, **_k)", "by_hand(*_a, **_k)", 1)


@edit()
def embeddings_scaled(m: Model) -> None:
    m.replace(m.gpt, EMBEDDED, "math.sqrt(self.config.n_embd) / 2 * self._t(_i) + self._p(_j)", 1)


@edit()
def embeddings_by_a_hook(m: Model) -> None:
    [(_, found)] = pieces(m.gpt, EMBEDDED)
    body = method(m.gpt, "__init__").body
    body.append(statement(
        f"self.{found['_t']}.register_forward_hook(lambda module, inputs, y: 3 * y)"))


@edit()
def a_norm_of_the_embeddings(m: Model) -> None:
    m.construct(m.gpt, "self.norm = nn.LayerNorm(config.n_embd)")
    m.replace(m.gpt, EMBEDDED, "self.norm(self._t(_i) + self._p(_j))", 1)


@edit()
def gains_of_the_branches(m: Model) -> None:
    m.construct(m.block, "self.gain = nn.Parameter(torch.full((2,), 0.5))")
    m.replace(m.block, ADDED, "_x + self.gain[0] * self._f(self._n(_y), *_r)", 2)


@edit()
def clamped_residual(m: Model) -> None:
    m.replace(m.block, ADDED, "(_x + self._f(self._n(_y), *_r)).clamp(-1, 1)", 2)


@edit()
def values_of_the_first_layer(m: Model) -> None:
    _, _, v, *_ = m.heads()
    m.before_storing(f"first.append({v})\n{v} = ({v} + first[0]) / 2")
    for part in m.attention, m.block:
        method(part, "forward").args.args.append(ast.arg("first"))
    for part, of in (m.block, parameters(method(m.attention, "forward"))), \
            (m.gpt, parameters(method(m.block, "forward"))):
        [call] = [n for n in ast.walk(part) if isinstance(n, ast.Call)
                  and len(n.args) == len(of) - 1 and any(pieces(n.func, "_f"))
                  and getattr(n.args[1], "id", "") == of[1]]
        call.args.append(ast.Name("first"))
    method(m.gpt, "layers").body.insert(1, statement("first = []"))


@edit()
def skips_between_blocks(m: Model) -> None:  # as in a U-net
    layers = method(m.gpt, "layers")
    [loop] = [n for n in ast.walk(layers) if isinstance(n, ast.For)]
    x = loop.body[0].targets[0].id
    layers.body.insert(1, statement("skips = []"))
    loop.body.insert(0, statement(f"if len(skips) > len(self.{blocks(m)}) // 2 - 1:\n"
                                  f"    {x} = {x} + 2 * skips.pop()"))
    loop.body.insert(2, statement(f"skips.append({x})"))


def blocks(m: Model) -> str:
    """What GPT calls its blocks."""
    [(_, found)] = pieces(m.gpt, "self._h = nn.ModuleList(*_a)")
    return found["_h"]


@edit()
def heads_of_each_layer(m: Model) -> None:
    m.before_classes("from dataclasses import replace")
    m.replace(m.gpt, f"nn.ModuleList({m.block.name}(_c) for _i in range(_n))",
              f"nn.ModuleList({m.block.name}(replace(_c, n_head=max(1, _c.n_head // (1 + i))))"
              " for i in range(_n))", 1)


@edit()
def widths_of_each_layer(m: Model) -> None:
    m.construct(m.block, "config = copy.copy(config)\nconfig.width = 4 + layer")
    m.before_classes("import copy")
    method(m.block, "__init__").args.args.append(ast.arg("layer"))
    m.replace(m.mlp, "4 * _c", "config.width * _c", 2)
    m.replace(m.gpt, f"nn.ModuleList({m.block.name}(_c) for _i in range(_n))",
              f"nn.ModuleList({m.block.name}(_c, i) for i in range(_n))", 1)


@edit()
def one_block_for_all_layers(m: Model) -> None:  # ALBERT
    m.replace(m.gpt, f"nn.ModuleList({m.block.name}(_c) for _i in range(_n))",
              f"nn.ModuleList([{m.block.name}(_c)] * _n)", 1)


@edit()
def each_block_twice(m: Model) -> None:
    h = blocks(m)
    m.replace(method(m.gpt, "layers"), f"enumerate(self.{h})",
              f"enumerate([*self.{h}, *self.{h}])", 1)
    m.replace(method(m.gpt, "new_cache"), f"len(self.{h})", f"2 * len(self.{h})", 1)


@edit()
def lora(m: Model) -> None:
    m.before_classes("""
class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out, **options):
        super().__init__(n_in, n_out, **options)
        self.a, self.b = nn.Parameter(torch.empty(4, n_in)), nn.Parameter(torch.empty(n_out, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T
""")
    m.replace(m.attention, "nn.Linear(_i, 3 * _c, **_k)", "LoRALinear(_i, 3 * _c, **_k)", 1)


def experts(m: Model, choice: str) -> None:
    [(_, found)] = pieces(m.block, f"self._m = {m.mlp.name}(*_a)")
    at = m.tree.body.index(m.block)
    m.tree.body[at:at] = ast.parse("""
class Experts(nn.Module):
    def __init__(self, config, n=4):
        super().__init__()
        self.router = nn.Linear(config.n_embd, n, bias=False)
        self.up = nn.Parameter(torch.empty(n, config.n_embd, 2 * config.n_embd))
        self.down = nn.Parameter(torch.empty(n, 2 * config.n_embd, config.n_embd))

    def forward(self, x):
        share = self.router(x).softmax(-1)
        CHOICE
        y = F.gelu(torch.einsum("btc,ncf->btnf", x, self.up))
        return torch.einsum("btnf,nfc,btn->btc", y, self.down, share)
""".replace("CHOICE", choice)).body
    m.replace(m.block, f"self.{found['_m']} = {m.mlp.name}(*_a)",
              f"self.{found['_m']} = Experts(*_a)", 1)


@edit()
def experts_all_weighed(m: Model) -> None:
    experts(m, "pass")


@edit()
def experts_the_likeliest(m: Model) -> None:
    experts(m, "share = share.masked_fill(share < share.amax(-1, keepdim=True), 0)")


@edit()
def a_head_with_a_bias(m: Model) -> None:
    m.replace(m.gpt, "nn.Linear(_c, _v, bias=False)", "nn.Linear(_c, _v, bias=True)", 1)
    m.replace(m.gpt, "self._a.weight = self._b.weight", "pass", 1)


@edit()
def a_field_with_a_default(m: Model) -> None:
    m.field("logit_scale: float = 0.5")
    m.replace(method(m.gpt, "logits"), "return _x", "return _x * self.config.logit_scale", 1)


@edit(same=True)
def an_option_removed(m: Model) -> None:
    body = m.class_called("GPTConfig").body
    for name in ("attn_logn", "logn_base"):
        body.remove(next(s for s in body if any(pieces(s, f"{name}: _t = _d"))))
    m.class_called("GPTConfig").body.remove(method(m.class_called("GPTConfig"), "__post_init__"))
    m.replace(m.attention, "_x.attn_logn", "'off'", 1)
    m.replace(m.attention, "_x.logn_base", "None", 1)


@edit(same=True)
def other_names(m: Model) -> None:
    [(_, found)] = pieces(m.gpt, EMBEDDED)
    [(_, up)] = pieces(m.mlp, f"self._f = {UP}")
    m.rename({blocks(m): "blocks", found["_t"]: "tok", found["_p"]: "place", up["_f"]: "up_proj"})


@edit()
def other_names_and_another_activation(m: Model) -> None:
    other_names(m)
    relu_squared(m)


@edit(same=True)
def no_dropout(m: Model) -> None:
    m.replace(m.tree, "F.dropout(_x, *_a)", "_x", 3)


@edit()
def normed_weights(m: Model) -> None:
    m.replace(m.mlp, UP, f"nn.utils.parametrizations.weight_norm({UP})", 1)
    m.replace(m.mlp, GELU, "F.silu(_h)", 1)


@edit(same=True)
def weights_read_by_code(m: Model) -> None:
    m.replace(m.mlp, "F.gelu(self._f(_x), *_a, **_k)",
              "F.gelu(F.linear(_x, self._f.weight, self._f.bias), *_a, **_k)", 1)


@edit(same=True)
def a_mask_in_a_buffer(m: Model) -> None:
    *_, pos, _, _ = m.heads()
    m.construct(m.attention, "self.register_buffer('past', torch.ones(config.block_size, "
                             "config.block_size, dtype=torch.bool).tril())")
    m.replace(m.attention, SDPA, "F.scaled_dot_product_attention(_q, _k, _v, "
              f"self.past[{pos}, : _k.size(2)].view(-1, 1, {pos}.size(-1), _k.size(2)), _d)", 1)


@edit(same=True)
def a_buffer_that_training_changes(m: Model) -> None:
    forward = method(m.block, "forward")
    x = parameters(forward)[0]
    m.construct(m.block, "self.register_buffer('scale', torch.ones(()))")
    forward.body[0:0] = ast.parse(f"""
if self.training:
    self.scale += 0.1
{x} = {x} * self.scale
""").body


@edit()
def something_in_hidden(m: Model) -> None:
    m.replace(method(m.gpt, "hidden"), "return _x", "return _x.clamp(-1, 1)", 1)


@edit()
def tokens_see_the_one_before(m: Model) -> None:  # a shift, as in RWKV
    x = parameters(method(m.block, "forward"))[0]
    method(m.block, "forward").body.insert(0, statement(
        f"{x} = {x} + F.pad({x}, (0, 0, 1, 0))[:, :-1] / 2"))


@edit(same=True)
def attention_without_the_cache(m: Model) -> None:  # as in a nanoGPT
    store = m.heads()[-1]
    forward = method(m.attention, "forward")
    forward.body = [s for s in forward.body if not any(pieces(s, f"{store}(*_a)"))]
    m.replace(forward, SDPA, "F.scaled_dot_product_attention(_q, _k, _v, is_causal=True)", 1)


# --------------------------------------------------------------------------------------- compared


class Helper:
    """A process that has imported torch and forks one for each job (tests/edited.py)."""

    def __init__(self) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.done: dict[Any, dict[str, Any]] = {}  # what was answered
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("edited.py"))], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=env)

    def do(self, **job: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def helper():
    helper = Helper()
    yield helper
    helper.process.stdin.close()
    assert helper.process.wait(timeout=60) == 0


KINDS = ("float32", "int8"), ("bfloat16", "int4")  # those of one job; the second is slow


def cases() -> Iterator[Any]:
    for kinds in KINDS:
        for name in EDITS:
            for kind in kinds:
                marks = [pytest.mark.slow] if kinds is KINDS[1] else []
                yield pytest.param(name, kind, id=f"{name}-{kind}", marks=marks)


@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_an_edited_model_writes_what_a_plain_loop_over_it_writes(name, kind, helper, tmp_path):
    kinds = next(kinds for kinds in KINDS if kind in kinds)
    if (name, kinds) not in helper.done:
        (tmp_path / "model.py").write_text(edited(name), encoding="utf-8")
        helper.done[name, kinds] = helper.do(edited=str(tmp_path), same=EDITS[name].same,
                                             kinds=kinds)
    done = helper.done[name, kinds]
    assert "error" not in done, done["error"]
    assert not done["failed"][kind], "\n".join([*done["failed"][kind], done["said"][kind]])


# ------------------------------------------------------------------------------------- processes

PROCESSES = {  # edits -> settings of train.py that suit them
    "rotary_in_place_of_positions": "", "grouped_queries": "",
    "experts_the_likeliest": "--optimizer=muon",
    "other_names_and_another_activation": "--optimizer=muon --layer_lr_decay=0.9",
    "one_block_for_all_layers": "--n_layer=12"}
WAYS = {  # of sample.py -> the kind of weights that it means
    "--kernels=auto": "float32", "--kernels=torch": "float32", "--quantize=int8": "int8",
    "--kernels=torch --dtype=bfloat16": "bfloat16"}
TRAIN = ("train.py config/tiny.py --dataset=my.txt --tokenizer=char --out_dir=out/run --n_head=4 "
         "--block_size=32 --batch_size=4 --eval_iters=0 --dtype=float32")
PROMPTS = "the", "it was his that and it was in the that", "of her"


class Clone:
    """A copy of the clone, in which a model.py can be edited and scripts be run."""

    def __init__(self, folder: Path, helper: Helper):
        self.folder, self.helper = folder, helper
        self.checkpoint = folder / "out" / "run" / "ckpt" / "step_000020"
        self.env = {"BONSAI_DATA": str(folder / "sets"), "BONSAI_OUT": str(folder / "out"),
                    "WANDB_MODE": "disabled"}
        shutil.copytree(CLONE, folder, ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "out", "tests", "bench", "docs", "*.bin", "*.egg-info"))
        words = random.Random(0).choices("the of and to in that it was his her".split(), k=4000)
        (folder / "my.txt").write_text(" ".join(words))
        (folder / "prompts.txt").write_text("\n".join(PROMPTS))

    def run(self, command: str) -> str:
        """Run a script, which must succeed -> what it printed."""
        out = self.folder / "said"
        done = self.helper.do(argv=command.split(), cwd=str(self.folder), env=self.env,
                              out=str(out))
        stderr = Path(f"{out}.stderr").read_text()
        assert done["code"] == 0, done.get("error", "") + stderr[-2000:]
        return Path(f"{out}.stdout").read_text()

    def train(self, name: str) -> None:
        """Edit model.py and train 10 updates and then another 10."""
        (self.folder / "model.py").write_text(edited(name), encoding="utf-8")
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        command = f"{TRAIN} {PROCESSES.get(name, '')}"
        self.run(f"{command} --max_iters=10")
        self.run(f"{command} --max_iters=20 --init_from=resume")

    def compare(self, kind: str, texts: list[str]) -> None:
        """Compare what was written after each of PROMPTS with a plain loop over the checkpoint."""
        assert all(len(text) == 40 for text in texts)  # a character is a token
        done = self.helper.do(checkpoint=str(self.checkpoint), clone=str(self.folder), kind=kind,
                              texts=list(zip(PROMPTS, texts, strict=True)))
        assert "error" not in done, done["error"]
        assert not done["failed"], f"weights in {kind}: {done['failed']}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory, helper) -> Clone:
    return Clone(tmp_path_factory.mktemp("edits") / "clone", helper)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *PROCESSES, "a_buffer_that_training_changes"])
def test_the_scripts_of_an_edited_clone_agree(name, clone):
    """It trains, goes on, is measured, and sample.py writes what a plain loop over it writes."""
    clone.train(name)
    loss = json.loads((clone.checkpoint / "state.json").read_text())["val_loss"]
    told = json.loads(clone.run("-m kit.evaluate out/run --step=20 --json"))
    assert told["loss"] == pytest.approx(loss, rel=1e-4)
    for way, kind in WAYS.items():
        said = clone.run(f"sample.py --out_dir={clone.checkpoint} --temperature=0 {way} "
                         "--prompts_file=prompts.txt --max_new_tokens=40")
        clone.compare(kind, [json.loads(line)["text"] for line in said.splitlines()])


@pytest.mark.slow
def test_the_server_of_an_edited_clone_agrees(clone):
    clone.train("grouped_queries")
    server = subprocess.Popen(
        [sys.executable, "-m", "extras.serve", f"--out_dir={clone.checkpoint}", "--port=0",
         "--quantize=int8"], cwd=clone.folder, env=os.environ | clone.env, text=True,
        stderr=subprocess.PIPE)
    try:
        said = []
        while not (url := re.search(r"http://[\d.:]+/v1", "".join(said))):
            said.append(server.stderr.readline())
            assert said[-1], said
        request = Request(f"{url[0]}/completions", headers={"Content-Type": "application/json"},
                          data=json.dumps({"prompt": PROMPTS, "temperature": 0,
                                           "max_tokens": 40}).encode())
        with urlopen(request, timeout=60) as answer:
            clone.compare("int8", [c["text"] for c in json.load(answer)["choices"]])
    finally:
        server.terminate()
        server.communicate(timeout=60)
