/* stamp FILE: append CLOCK_MONOTONIC nanoseconds to FILE with one write, exit 0. */
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct timespec now;
    char text[64];
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (argc > 1) {
        int fd = open(argv[1], O_WRONLY | O_APPEND | O_CREAT, 0644);
        int n = snprintf(text, sizeof text, "%lld\n", now.tv_sec * 1000000000LL + now.tv_nsec);
        if (fd < 0 || write(fd, text, n) != n) return 1;
    }
    return 0;
}
