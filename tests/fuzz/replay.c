/* replay.c: runs a fuzz target over the named files, without libFuzzer and clang. */
#include <stdint.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
main(int argc, char **argv)
{
    static uint8_t data[1 << 16];

    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (file == NULL) {
            perror(argv[i]);
            return 1;
        }
        (void)LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof data, file));
        (void)fclose(file);
    }
    printf("%d inputs\n", argc - 1);
    return 0;
}
