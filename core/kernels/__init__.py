"""Operations on tensors, chosen by device type; they import torch only."""
