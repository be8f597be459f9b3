"""A pair on its way to users: faults in a drafter's checkpoint (`blockdraft doctor`), other engines started with a pair
(`blockdraft launch`), and a drafter's repository on the hub (`blockdraft push`)."""
