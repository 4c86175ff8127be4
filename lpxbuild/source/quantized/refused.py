"""Methods that lpx knows by name and does not read, with the reason."""

from __future__ import annotations

from types import MappingProxyType

from lpxbuild.source.quantized.method import Method

METHOD = Method(
    title="others",
    reasons=MappingProxyType(
        {
            "bitsandbytes": "bitsandbytes (bnb) quantizes for its own kernels while it loads; no engine's kernel takes "
            "its blocks of code book entries",
            "hqq": "its zero points are fractions, which no layout that lpx writes can hold",
            "eetq": "its int8 weights are ordered for one kernel on one kind of GPU",
            "quanto": "its files hold the library's own kind of tensor",
            "torchao": "its files hold the library's own kind of tensor",
            "aqlm": "its weights are sums of code book entries, which no layout that lpx writes can hold",
            "vptq": "its weights are code book entries, which no layout that lpx writes can hold",
            "quip": "its weights are code book entries, which no layout that lpx writes can hold",
            "higgs": "its weights are code book entries, which no layout that lpx writes can hold",
            "spqr": "its outliers are stored apart, which no layout that lpx writes can hold",
            "bitnet": "its ternary weights fit no kernel of the engines that lpx builds for",
            "marlin": "its words are ordered for one kernel",
            "mxfp4": "its blocks of 32 with shared exponents fit no format that lpx writes",
        }
    ),
    table=(
        (
            "bitsandbytes, HQQ, EETQ, Quanto, torchao, AQLM, VPTQ, QuIP, HIGGS, SpQR, BitNet, Marlin, MXFP4",
            "refused",
            "refused",
            "–",
        ),
    ),
)
