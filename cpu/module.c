/* minipaged.ops.cpu._kernels: run a list of commands on a team of threads, without the GIL.
 *
 * Commands hold addresses and sizes, which nothing here can check: minipaged/ops/cpu/ops.py takes them from arrays that
 * it keeps alive, and from the sizes of the model, which were checked when it was loaded.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "command.h"
#include "team.h"

typedef Loops Kernels(const Command *, int);
#if defined(__x86_64__)
Kernels kernels_v2, kernels_v3, kernels_v4, kernels_v4_vnni, kernels_v4_bf16;
#elif defined(__aarch64__)
Kernels kernels_v8, kernels_v8_dotprod;
#else
Kernels kernels_base;
#endif

typedef struct {
    const char *name;
    Kernels *kernels;
    int supported;
} InstructionSet;

#if defined(__aarch64__)
static int has_dotprod(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1; /* all of Apple's */
#endif
}
#endif

/* From the least to the most capable. */
static int instruction_sets(InstructionSet *sets) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512cd");
    int vnni = v4 && __builtin_cpu_supports("avx512vnni");
    int bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    sets[count++] = (InstructionSet){"x86-64-v2", kernels_v2, __builtin_cpu_supports("sse4.2")};
    sets[count++] = (InstructionSet){"x86-64-v3", kernels_v3, v3};
    sets[count++] = (InstructionSet){"x86-64-v4", kernels_v4, v4};
    sets[count++] = (InstructionSet){"x86-64-v4+vnni", kernels_v4_vnni, vnni};
    sets[count++] = (InstructionSet){"x86-64-v4+vnni+bf16", kernels_v4_bf16, bf16};
#elif defined(__aarch64__)
    sets[count++] = (InstructionSet){"armv8", kernels_v8, 1};
    sets[count++] = (InstructionSet){"armv8.2+dotprod", kernels_v8_dotprod, has_dotprod()};
#else
    sets[count++] = (InstructionSet){"base", kernels_base, 1};
#endif
    return count;
}

static void destroy_team(PyObject *capsule) { team_destroy(PyCapsule_GetPointer(capsule, "team")); }

static PyObject *create_team(PyObject *module, PyObject *arguments) {
    (void)module;
    int num_threads;
    if (!PyArg_ParseTuple(arguments, "i", &num_threads)) return NULL;
    if (num_threads < 1) return PyErr_Format(PyExc_ValueError, "num_threads is %d; expected at least 1", num_threads);
    Team *team = team_create(num_threads);
    if (!team) return PyErr_Format(PyExc_OSError, "cannot start %d threads", num_threads);
    return PyCapsule_New(team, "team", destroy_team);
}

static PyObject *supported(PyObject *module, PyObject *arguments) {
    (void)module, (void)arguments;
    InstructionSet sets[8];
    int count = instruction_sets(sets);
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < count; i++) {
        if (!sets[i].supported) continue;
        PyObject *name = PyUnicode_FromString(sets[i].name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *run(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *capsule;
    const char *name;
    Py_buffer commands;
    if (!PyArg_ParseTuple(arguments, "Osy*", &capsule, &name, &commands)) return NULL;
    PyObject *result = NULL;
    Kernels *kernels = NULL;
    InstructionSet sets[8];
    int count = instruction_sets(sets);
    for (int i = 0; i < count; i++)
        if (sets[i].supported && !strcmp(sets[i].name, name)) kernels = sets[i].kernels;
    Team *team = PyCapsule_GetPointer(capsule, "team");
    if (team && commands.len % (Py_ssize_t)sizeof(Command)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no whole number of commands of %zu", commands.len,
                     sizeof(Command));
    } else if (team && !kernels) {
        PyErr_Format(PyExc_ValueError, "instruction set %s is unknown or not supported here", name);
    } else if (team) {
        int failed;
        Loops loops = kernels(commands.buf, (int)(commands.len / (Py_ssize_t)sizeof(Command)));
        Py_BEGIN_ALLOW_THREADS
        failed = team_run(team, &loops);
        Py_END_ALLOW_THREADS
        result = failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
    }
    PyBuffer_Release(&commands);
    return result;
}

/* A field of a struct; its format is a letter of Python's `struct` module. */
typedef struct {
    const char *record, *name;
    int offset;
    char format;
} Field;

#define FIELD(type, name)                                                           \
    {#type, #name, offsetof(type, name),                                            \
     _Generic(((type *)0)->name, int32_t: 'i', float: 'f', int64_t: 'q', default: 'Q')},
#define HEAD(type) FIELD(type, op) FIELD(type, rows)
#define QUANTISED(type, name) FIELD(type, name.q) FIELD(type, name.scale) FIELD(type, name.sum)
#define KV_CACHE(type)                                                                              \
    FIELD(type, cache.keys) FIELD(type, cache.values) FIELD(type, cache.block_stride)               \
    FIELD(type, cache.key_head_stride) FIELD(type, cache.value_head_stride) FIELD(type, cache.kind) \
    FIELD(type, cache.num_kv_heads) FIELD(type, cache.head_dim) FIELD(type, cache.block_size)
#define PRODUCT(type)                                                                                         \
    HEAD(type) FIELD(type, kind) FIELD(type, in) FIELD(type, out) FIELD(type, stride) FIELD(type, input) \
    QUANTISED(type, quantised) FIELD(type, weight) FIELD(type, bias) FIELD(type, output)

/* Python knows no others, and gives a value to each of these. */
static const Field fields[] = {
    FIELD(BatchHeader, token_ids) FIELD(BatchHeader, positions)
    FIELD(BatchHeader, kv_extents) FIELD(BatchHeader, slots)
    FIELD(BatchHeader, cu_seqlens) FIELD(BatchHeader, rows) FIELD(BatchHeader, block_tables)
    FIELD(BatchHeader, sampled) FIELD(BatchHeader, table_stride) FIELD(BatchHeader, num_sequences)

    HEAD(Embed) FIELD(Embed, kind) FIELD(Embed, width) FIELD(Embed, table) FIELD(Embed, output)
    FIELD(Embed, batch)

    HEAD(RmsNorm) FIELD(RmsNorm, width) FIELD(RmsNorm, eps) FIELD(RmsNorm, input) FIELD(RmsNorm, weight)
    FIELD(RmsNorm, output) QUANTISED(RmsNorm, made)

    HEAD(Quantise) FIELD(Quantise, width) FIELD(Quantise, stride) FIELD(Quantise, input)
    QUANTISED(Quantise, made)

    PRODUCT(Linear) FIELD(Linear, residual)

    PRODUCT(GatedLinear) QUANTISED(GatedLinear, made)

    HEAD(RopeAndCache) FIELD(RopeAndCache, num_query_heads) FIELD(RopeAndCache, eps) KV_CACHE(RopeAndCache)
    FIELD(RopeAndCache, rope) FIELD(RopeAndCache, q_norm) FIELD(RopeAndCache, k_norm) FIELD(RopeAndCache, output)
    FIELD(RopeAndCache, batch)

    HEAD(Attention) FIELD(Attention, num_query_heads) FIELD(Attention, stride) FIELD(Attention, window)
    FIELD(Attention, scale) KV_CACHE(Attention) FIELD(Attention, input) FIELD(Attention, output)
    QUANTISED(Attention, made) FIELD(Attention, batch)

    HEAD(Take) FIELD(Take, width) FIELD(Take, input) FIELD(Take, output) FIELD(Take, batch)

    HEAD(Sample) FIELD(Sample, vocab_size) FIELD(Sample, logits) FIELD(Sample, temperature)
    FIELD(Sample, top_p) FIELD(Sample, min_p) FIELD(Sample, top_k) FIELD(Sample, uniforms) FIELD(Sample, scratch)
    FIELD(Sample, output)
};

static const struct {
    const char *name;
    int op;
    int num_bytes;
} records[] = {
    {"Embed", OP_EMBED, sizeof(Embed)},
    {"RmsNorm", OP_RMS_NORM, sizeof(RmsNorm)},
    {"Quantise", OP_QUANTISE, sizeof(Quantise)},
    {"Linear", OP_LINEAR, sizeof(Linear)},
    {"GatedLinear", OP_GATED_LINEAR, sizeof(GatedLinear)},
    {"RopeAndCache", OP_ROPE_AND_CACHE, sizeof(RopeAndCache)},
    {"Attention", OP_ATTENTION, sizeof(Attention)},
    {"Take", OP_TAKE, sizeof(Take)},
    {"Sample", OP_SAMPLE, sizeof(Sample)},
    {"BatchHeader", -1, sizeof(BatchHeader)},
};

/* {record: (operation, bytes, {field: (offset, format)})} */
static PyObject *layouts(PyObject *module, PyObject *arguments) {
    (void)module, (void)arguments;
    PyObject *all = PyDict_New();
    for (size_t r = 0; all && r < sizeof records / sizeof *records; r++) {
        PyObject *named = PyDict_New();
        for (size_t f = 0; named && f < sizeof fields / sizeof *fields; f++) {
            if (strcmp(fields[f].record, records[r].name)) continue;
            PyObject *place = Py_BuildValue("(iC)", fields[f].offset, fields[f].format);
            if (!place || PyDict_SetItemString(named, fields[f].name, place)) Py_CLEAR(named);
            Py_XDECREF(place);
        }
        PyObject *record = named ? Py_BuildValue("(iiN)", records[r].op, records[r].num_bytes, named) : NULL;
        if (!record || PyDict_SetItemString(all, records[r].name, record)) Py_CLEAR(all);
        Py_XDECREF(record);
    }
    return all;
}

static PyMethodDef methods[] = {
    {"create_team", create_team, METH_VARARGS, "create_team(num_threads): threads that sleep until there is work."},
    {"supported", supported, METH_NOARGS, "supported(): names of usable instruction sets, least capable first."},
    {"layouts", layouts, METH_NOARGS, "layouts(): {struct: (operation, bytes, {field: (offset, format)})}."},
    {"run", run, METH_VARARGS, "run(team, instruction_set, commands): execute an array of commands, without the GIL."},
    {NULL, NULL, 0, NULL},
};

static int add_constants(PyObject *module) { return PyModule_AddIntConstant(module, "COMMAND_BYTES", sizeof(Command)); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_constants}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "Kernels of the CPU backend.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
