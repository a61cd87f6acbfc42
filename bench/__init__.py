"""One file per question of speed, side by side with others."""
