"""Any causal language model of the `transformers` library as a policy.

`policy.HFPolicy` has the interface that the trainers and the inference engine ask of a policy, so both do
with it what they do with ours. Tokens run packed, without padding; only the attention is ours (`attention`),
for documents in training and for slots of a cache (`cache`) in generation. `folder` reads and writes plain
folders of that library, `tiny` makes a small model, `weights` names what is published.

`transformers` is imported when a policy is made, `peft` when it has adapters.
"""
