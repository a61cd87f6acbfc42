"""How fast is it, and how safe? One file or folder per question, side by side with others."""
