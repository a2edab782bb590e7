"""What `crisp prepare` measures for the policy `saliency`: sensitivities and rescaling."""
