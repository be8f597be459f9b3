/* Multiplies what a file says (test_integers.py writes it), on processors that Python does not run on here. */
#include <stdio.h>
#include SOURCE

static void *next(FILE *file, i64 bytes) {
    void *memory = malloc(bytes + 1);
    return fread(memory, 1, bytes, file) == (size_t)bytes ? memory : 0;
}

int main(int count, char **arguments) {
    FILE *file = count > 1 ? fopen(arguments[1], "rb") : 0;
    i64 head[9]; /* inputs, outputs, kind, group, kind of scales, and of offsets or -1, rows, bytes of codes, span */
    while (file && fread(head, 8, 9, file) == 9) {
        const i64 blocks = (head[1] + LANES - 1) / LANES, factors = blocks * LANES * (head[0] / head[3]);
        Linear l = {.inputs = head[0], .outputs = head[1], .kind = head[2], .group = head[3], .scale_kind = head[4]};
        l.offset_kind = head[5], l.span = head[8];
        const i64 units = head[8] ? 2 * factors / head[8] : 0;
        l.weight = next(file, head[7]);
        l.scale = next(file, factors * FACTOR_BYTES(head[4]));
        l.scale_unit = head[4] == INT8 ? next(file, units) : 0;
        l.offset = head[5] < 0 ? 0 : next(file, factors * FACTOR_BYTES(head[5]));
        l.offset_unit = head[5] == INT8 ? next(file, units) : 0;
        const float *x = next(file, 4 * head[6] * head[0]);
        float *y = malloc(4 * head[6] * head[1] + 4), *alone = malloc(4 * head[1] + 4);
        if (!x || packed_linear(&l, x, l.inputs, head[6], y, 0)) return 1;
        for (i64 row = 0; row < head[6]; row++) { /* the same bits for a row alone */
            if (packed_linear(&l, x + row * l.inputs, l.inputs, 1, alone, 0)) return 2;
            if (memcmp(alone, y + row * head[1], 4 * head[1])) return 3;
        }
        fwrite(y, 4, head[6] * head[1], stdout);
    }
    return !file;
}
