"""Any specdec proposer that reads tokens, inside SGLang: an algorithm of its registry, named SPECDEC.

    SPECDEC_SGLANG='{"method": "ngram"}' python -m sglang.launch_server --speculative-algorithm SPECDEC \\
        --speculative-num-draft-tokens 5 --model-path ...

SGLang verifies so many tokens of each request in a step, of which the first is the newest one: the others are drafts.
"""
