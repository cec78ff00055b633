/* PID 1 of a test guest: prints what its sysfs says about PCI and NUMA, then powers off; must not need anything else.
 * With pnh.hotplug=N on the kernel's command line it waits for N more PCI functions and prints everything again.
 *
 *   @begin
 *   @dir devices/pci0000:80/0000:80:00.0/0000:81:00.0
 *   numa_node = 1
 *   resource = 0xfe800000 0xfe803fff 0x140204\n0x0 0x0 0x0
 *   @dir devices/system/node/node0
 *   cpulist = 0
 *   @log pci 0000:81:00.0: BAR 0: no space for [mem size 0x00004000 64bit]
 *   @end
 *
 * Newlines inside a value are written \n. The kernel's own messages are off meanwhile.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LOG_READ_ALL = 3, LOG_CONSOLE_OFF = 6 };

static const char *const pci_attributes[] = {"vendor", "device", "subsystem_vendor", "subsystem_device", "class",
                                             "numa_node", "local_cpulist", "resource", NULL};
static const char *const node_attributes[] = {"cpulist", "distance", "meminfo", NULL};
/* What the kernel says when it could not place a bus or a window. */
static const char *const troubles[] = {"can't", "no space", "failed to", "conflict", "unusable", "invalid", "exceeds",
                                       NULL};

static void print_attribute(const char *folder, const char *name) {
    char path[8192], text[8192];
    snprintf(path, sizeof path, "/sys/%s/%s", folder, name);
    int file = open(path, O_RDONLY);
    if (file < 0)
        return;
    ssize_t size = read(file, text, sizeof text);
    close(file);
    while (size > 0 && text[size - 1] == '\n')
        size--;
    if (size < 0)
        return;
    printf("%s = ", name);
    for (ssize_t i = 0; i < size; i++)
        text[i] == '\n' ? fputs("\\n", stdout) : putchar(text[i]);
    putchar('\n');
}

static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void print_folders(const char *parent, const char *prefix, const char *const *attributes) {
    struct dirent **entries;
    char path[4096], real[4096];
    snprintf(path, sizeof path, "/sys/%s", parent);
    int count = scandir(path, &entries, is_visible, alphasort);
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof path, "/sys/%s/%s", parent, entries[i]->d_name);
        if (strncmp(entries[i]->d_name, prefix, strlen(prefix)) != 0 || realpath(path, real) == NULL)
            continue;
        const char *folder = real + strlen("/sys/");
        printf("@dir %s\n", folder);
        for (const char *const *name = attributes; *name != NULL; name++)
            print_attribute(folder, *name);
    }
}

static void print_troubles(void) {
    static char log[1 << 20];
    int size = klogctl(LOG_READ_ALL, log, sizeof log - 1);
    log[size > 0 ? size : 0] = '\0';
    for (char *line = strtok(log, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        if (strstr(line, "pci") == NULL && strstr(line, "busn_res") == NULL)
            continue;
        for (const char *const *trouble = troubles; *trouble != NULL; trouble++)
            if (strstr(line, *trouble) != NULL) {
                char *text = strchr(line, ']');
                printf("@log %s\n", text != NULL ? text + 2 : line);
                break;
            }
    }
}

static int count_functions(void) {
    int count = 0;
    DIR *folder = opendir("/sys/bus/pci/devices");
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
        count += is_visible(entry);
    if (folder != NULL)
        closedir(folder);
    return count;
}

static void report(void) {
    printf("\n@begin\n");
    print_folders("bus/pci/devices", "", pci_attributes);
    print_folders("devices/system/node", "node", node_attributes);
    print_troubles();
    printf("@end\n");
    fflush(stdout);
}

/* The number behind a word of the kernel's command line; 0 without it. */
static int asked(const char *word) {
    char line[4096] = "";
    FILE *file = fopen("/proc/cmdline", "r");
    char *found = file != NULL && fgets(line, sizeof line, file) != NULL ? strstr(line, word) : NULL;
    return found != NULL ? atoi(found + strlen(word)) : 0;
}

int main(void) {
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mkdir("/dev", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    int console = open("/dev/console", O_RDWR);
    for (int descriptor = 0; console >= 0 && descriptor < 3; descriptor++)
        dup2(console, descriptor);
    static char buffer[1 << 16];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    klogctl(LOG_CONSOLE_OFF, NULL, 0);
    int more = asked("pnh.hotplug=");
    int before = count_functions();
    report();
    if (more > 0) {
        /* Whoever plugs them in also kills this guest when they do not come. */
        while (count_functions() < before + more)
            usleep(100 * 1000);
        sleep(1); /* BARs and driver come a little later */
        report();
    }
    sync();
    reboot(RB_POWER_OFF);
    for (;;)
        pause();
}
