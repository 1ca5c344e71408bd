"""A new architecture: grouped queries, rotary positions, gated MLP, RMS norms, one stream."""

from transformer_nfn import functional, nn, spaces, symmetry
from transformer_nfn.functional import Architecture, Naming, Rescaling, Vectors
from transformer_nfn.spaces import Axis, attention_part, axis_part, map_part, mlp_part, norm_part

PARTS = [
    axis_part(Axis.free("token", 7), Axis.perm("stream", 6), Axis.free("logit", 5)),
    map_part("W_E", "token", "stream"),
    *(norm_part("stream", gain) for gain in ("g_1", "g_2")),
    attention_part("stream", "stream", heads=2, queries=3, d_k=4, d_v=3, rotary="neighbours"),
    mlp_part("stream", "stream", d_ff=8, gated=True, biases=False),
    map_part("W_C", "stream", "logit"),
]
NAMES = {
    "embed.weight": "W_E: token stream", "lm_head.weight": "W_C: logit stream",
    "norm_1.weight": "g_1: stream", "norm_2.weight": "g_2: stream",
    "q_proj.weight": "W_Q: (group query qk) stream",
    "kv_proj.weight": "W_K: +(group qk) stream, W_V: +(group vo) stream",
    "o_proj.weight": "W_O: stream (group query vo)",
    "gate_up_proj.weight": "W_G: +neuron stream, W_U: +neuron stream",
    "down_proj.weight": "W_D: stream neuron",
}
GAIN_1 = Rescaling("gain_1", "stream", ("g_1",), ("W_Q", "W_K", "W_V"))
GAIN_2 = Rescaling("gain_2", "stream", ("g_2",), ("W_G", "W_U"))


def forward(w, X):
    x = X @ w["W_E"]
    x = x + functional.multi_head(functional.rms_norm(x) * w["g_1"][..., None, :], w, base=1e4)
    x = x + functional.gated_mlp(functional.rms_norm(x) * w["g_2"][..., None, :], w)
    return functional.rms_norm(x) @ w["W_C"]


space = spaces.compose("my_decoder", *PARTS)
decoder = Architecture(space, forward, Vectors(width=7), Naming(NAMES), (GAIN_1, GAIN_2))
U = space.randn(batch=1)
V = decoder.read(decoder.write(decoder.disguise(U)))
print(symmetry.compare(decoder, U, V), symmetry.fingerprint(decoder, V))
print({name: w.shape for name, w in nn.Equivariant(space, 1, 4)(V).items()})
