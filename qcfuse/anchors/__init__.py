"""Which tokens of a chunk stand for it in a compressed view. One file per rule, instantiated from conf/anchors."""
