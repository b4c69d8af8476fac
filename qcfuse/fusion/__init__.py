"""Cache fusion: stitch stored chunk caches, recompute the selected tokens, hand over a fused KV cache."""
