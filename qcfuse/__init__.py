"""Cache fusion for retrieval-augmented generation: QCFuse (arXiv 2606.05875), CacheBlend (EuroSys '25), baselines."""
