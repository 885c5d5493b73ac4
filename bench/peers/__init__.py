"""Other inference servers, served the same models and measured with the same load as ours."""
