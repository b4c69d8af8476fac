from qcfuse.data.chunking import any_cut_by_seam, cut, tokens_overlapping

# Five tokens of "ab cd efg": ab, space + c, d, space + e, fg.
OFFSETS = [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9)]


def test_cut_leaves_the_rest_in_the_last_chunk():
    assert cut(range(5), 2) == ((0, 1), (2, 3), (4,))
    assert cut([1, 2], 2) == ((1, 2),)
    assert cut([], 2) == ()


def test_tokens_that_share_a_character_count():
    assert tokens_overlapping(OFFSETS, [(3, 5)]) == (1, 2)
    assert tokens_overlapping(OFFSETS, [(6, 7), (0, 1)]) == (0, 3)
    assert tokens_overlapping(OFFSETS, [(4, 4)]) == ()


def test_empty_tokens_never_count_and_byte_tokens_of_one_character_all_do():
    assert tokens_overlapping([(0, 0), (0, 1), (0, 1), (1, 2)], [(0, 1)]) == (1, 2)


def test_a_span_is_cut_where_its_tokens_lie_in_two_chunks():
    assert any_cut_by_seam(OFFSETS, [(3, 5)], chunk_tokens=2)
    assert not any_cut_by_seam(OFFSETS, [(3, 5)], chunk_tokens=3)
    assert any_cut_by_seam(OFFSETS, [(3, 5), (6, 9)], chunk_tokens=4)
    # Two spans in two chunks are not one span in two.
    assert not any_cut_by_seam(OFFSETS, [(0, 4), (4, 7)], chunk_tokens=2)


def test_a_span_past_the_kept_tokens_is_not_cut():
    assert not any_cut_by_seam(OFFSETS, [(20, 30)], chunk_tokens=1)
