/* minipaged.ops.cpu._kernels: run a list of commands on a team of threads, without the GIL.
 *
 * Python passes addresses and sizes: minipaged/ops/cpu/ops.py takes them from arrays that it keeps alive and from the
 * checked model.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

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

static PyMethodDef methods[] = {
    {"create_team", create_team, METH_VARARGS, "create_team(num_threads): threads that sleep until there is work."},
    {"supported", supported, METH_NOARGS, "supported(): names of usable instruction sets, least capable first."},
    {"run", run, METH_VARARGS, "run(team, instruction_set, commands): execute an array of commands, without the GIL."},
    {NULL, NULL, 0, NULL},
};

static int add_constants(PyObject *module) { return PyModule_AddIntConstant(module, "COMMAND_BYTES", sizeof(Command)); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_constants}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "Kernels of the CPU backend.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
