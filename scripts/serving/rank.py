"""``python -m scripts.serving.rank DESCRIPTOR``: a rank other than 0, which computes and transfers for its node."""

from common.node.tensor_parallel.rank_main import end_rank, main
from kv_transfer.transports.ranks.endpoint import serve_rank

if __name__ == "__main__":
    end_rank(main(serve_rank))
