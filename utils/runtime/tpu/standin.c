/* Functions of the PJRT C API that the stand-in of a TPU replaces; see standin.py.

   In C, because the driver calls them from threads of its own while Python's lock may be held.
   Structures hold the first fields of those of pjrt_c_api.h, which only ever grow at their ends. */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_OUTPUTS 16384

typedef void *(*function)(void *);
typedef struct { size_t size; void *extension; } header;
typedef struct {
  header head; const char *name; size_t name_size; int kind; int64_t value; size_t value_size;
} option;
typedef struct { header head; const option *options; size_t num_options; } creation;
typedef struct { header head; void *executable; size_t num_outputs; } outputs;
typedef struct { outputs of; const char *const *kinds; const size_t *kind_sizes; } memory_kinds;

/* The driver's own functions, by their place in `replace`. */
static function create, count_outputs, counted[3];
static atomic_llong counts[3];

static void require(const header *head, size_t least) {
  if (head->size >= least) return;
  fprintf(stderr, "a structure of the PJRT C API has %zu bytes, not %zu\n", head->size, least);
  abort();
}

/* Open a client of one device instead of with the options of libtpu. */
static void *create_one_device(void *address) {
  static const option one = {{sizeof one, NULL}, "cpu_device_count", 16, 1, 1, 1};
  creation *arguments = address;
  require(&arguments->head, sizeof *arguments);
  arguments->options = &one;
  arguments->num_options = 1;
  return create(address);
}

/* Say for each output of a program that it lies in device memory. */
static void *name_memory(void *address) {
  static const char *kinds[MAX_OUTPUTS];
  static size_t sizes[MAX_OUTPUTS];
  memory_kinds *arguments = address;
  require(&arguments->of.head, sizeof *arguments);
  outputs found = {{sizeof found, NULL}, arguments->of.executable, 0};
  void *error = count_outputs(&found);
  if (error) return error;
  if (found.num_outputs > MAX_OUTPUTS) {
    fprintf(stderr, "a program of %zu outputs is too large for the stand-in\n", found.num_outputs);
    abort();
  }
  for (size_t n = 0; n < found.num_outputs; n++) {
    kinds[n] = "device"; /* by several threads at once, but always the same */
    sizes[n] = 6;
  }
  arguments->of.num_outputs = found.num_outputs;
  arguments->kinds = kinds;
  arguments->kind_sizes = sizes;
  return NULL;
}

/* Of the topology of TPUs, which XLA's CPU has not: one chip, one core, one process. */
#define TOPOLOGY 16 /* the extension's type, by pjrt_c_api.h */
#define TOPOLOGY_FUNCTIONS 30
typedef struct { size_t size; const void *topology; int32_t count; } counting;
typedef struct { size_t size; int type; void *next; function functions[TOPOLOGY_FUNCTIONS]; } extension;

static void *count_one(void *address) {
  ((counting *)address)->count = 1;
  return NULL;
}

static void *refuse(void *address) {
  (void)address;
  fprintf(stderr, "the stand-in has no such function of a topology\n");
  abort();
}

/* Add the extension to a table, before its own. */
static void add_topology(header *table) {
  static extension own = {sizeof own, TOPOLOGY, NULL, {NULL}};
  for (int n = 0; n < TOPOLOGY_FUNCTIONS; n++)
    own.functions[n] = n >= 7 && n <= 15 ? count_one : refuse; /* 7 to 15 give one number each */
  own.next = table->extension;
  table->extension = &own;
}

#define COUNT(n) \
  static void *count_##n(void *address) { counts[n]++; return counted[n](address); }
COUNT(0)
COUNT(1)
COUNT(2)

/* Replace functions of a table: creation, kinds of memory, then those that are counted. */
void replace(header *api, function *table, const int *places, int place_of_num_outputs) {
  static const function own[] = {create_one_device, name_memory, count_0, count_1, count_2};
  add_topology(api);
  count_outputs = table[place_of_num_outputs];
  create = table[places[0]];
  for (int n = 0; n < 3; n++) counted[n] = table[places[2 + n]];
  for (int n = 0; n < 5; n++) table[places[n]] = own[n];
}

long long read_count(int n) { return counts[n]; }
