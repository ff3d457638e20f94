"""What hands on elements of its first operand, and zeros, and computes nothing: what lies on a grid still does behind it."""

from __future__ import annotations

# ONNX operator types, and torch's functions and ATen's operators that become them.
_MOVES = {
    "Identity": "alias clone contiguous detach positive resolve_conj resolve_neg dropout feature_dropout lift_fresh_copy",
    "Reshape": "view view_as _unsafe_view reshape reshape_as unflatten ravel atleast_1d atleast_2d atleast_3d",
    "Flatten": "flatten",
    "Transpose": "permute transpose t mT numpy_T adjoint movedim moveaxis swapaxes swapdims channel_shuffle",
    "Squeeze": "squeeze",
    "Unsqueeze": "unsqueeze",
    "Expand": "expand expand_as broadcast_to",
    "Tile": "repeat tile repeat_interleave",
    "Slice": "slice narrow flip fliplr flipud rot90 roll diagonal",
    "Split": "split split_with_sizes chunk unbind tensor_split hsplit vsplit dsplit unsafe_chunk unsafe_split unsafe_split_with_sizes",
    "Gather": "select index index_select getitem",
    "GatherElements": "gather take_along_dim take",
    "Im2Col": "unfold im2col",
    "DepthToSpace": "pixel_shuffle",
    "SpaceToDepth": "pixel_unshuffle",
    "MaxPool": "max_pool1d max_pool2d max_pool3d",
    "GlobalMaxPool": "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    # Of these types, these functions alone: other modes compute, or put other numbers in.
    "Pad": "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    "Resize": "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
}

MOVING = frozenset(name for names in _MOVES.values() for name in names.split())
MOVING_TYPES = frozenset(_MOVES) - {"Pad", "Resize"}
JOINING = frozenset({"cat", "concat", "concatenate", "stack"})
