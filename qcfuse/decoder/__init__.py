"""Layer-level views of models; `base.Decoder` is the contract."""
