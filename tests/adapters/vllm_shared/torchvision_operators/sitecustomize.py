"""The operators that torchvision's Python part describes as it is imported. Its own are in a library for CUDA.

Nothing that reads images calls them.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
