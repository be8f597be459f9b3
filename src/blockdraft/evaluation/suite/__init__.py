"""The sets that papers on drafting measure, with their prompts, and what a paper reports beside what we measure."""
