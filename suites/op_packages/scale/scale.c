// An op package for HTP with one operation: Scale, y = 3 x + 1, on 16-bit tensors.
//
//   gcc -shared -fPIC -O2 scale.c -o libScale_CPU.so -L FOLDER -l:libQnnHtp.so
//
// FOLDER holds libQnnHtp.so of the onnxruntime-qnn wheel. The provider is `ScaleProvider`.
//
// The structures are our own. Interface 1.4 of op packages, and QHPI, by which a kernel reads and
// writes tensors, follow the public reference (https://docs.qualcomm.com/doc/80-63442-10, pages of
// QnnOpPackage.h, htp_qhpi and qhpi_8h). Names, order and use of what QHPI takes follow kernels
// under the MIT License, copyright (c) MLLM Team, in
// mllm/backends/qnn/custom-op-package/QhpiHmxProbePackage of
// https://github.com/Dan1un1u/mllm at 248f257754b976b329c080b808a79ad784b167dd. Sizes and numbers
// were found by running libQnnHtp.so 2.51: its messages name a field that has a wrong value.
#include <stdint.h>
#include <stddef.h>

#define PACKAGE "qnnfarm.scale"
#define FACTOR 3.0f
#define OFFSET 1.0f

typedef uint64_t Error;
typedef struct { uint32_t major, minor, patch; } Version;
typedef struct { Version core, backend; } ApiVersion;
typedef struct {
  const char *package_name;
  const char **operation_names;
  const void *operation_info;
  uint32_t operations;
  const void *optimizations;
  uint32_t n_optimizations;
  const char *sdk_build_id;
  const ApiVersion *sdk_api_version;
  const void *package_info;
  const Version *opset_version;
  size_t reserved[12];
} Info;
typedef struct {
  Version version;
  Error (*init)(void *);
  Error (*terminate)(void);
  Error (*get_info)(const Info **);
  Error (*validate)();
  Error (*create)(void *, void *, void **);
  Error (*release)(void *);
  Error (*log_initialize)(void *, int);
  Error (*log_set_level)(int);
  Error (*log_terminate)(void);
} Interface;

enum { QUINT16 = 2, FLAT_4 = 2, DIRECT = 0, DDR_OR_TCM = 0, HVX = 2 };
typedef struct { uint32_t rank, dims[8]; } Shape;
typedef struct { int32_t zero; float step; } Quantization;
typedef struct { uint32_t type, layout; uint8_t storage, placement; } Signature;
typedef struct {
  const char *name;
  uint32_t (*function)(void *, uint32_t, void **, uint32_t, const void *const *);
  uint32_t resources_and_flags;
  uint32_t inputs;
  const Signature *input;
  uint32_t outputs;
  const Signature *output;
  void *rest[10];
} Kernel;
typedef struct {
  const char *name;
  uint32_t n_kernels;
  const Kernel *kernels;
  void *rest[10];
} Operation;
extern uint32_t qhpi_register_ops_v1(uint32_t, const Operation *, const char *);
extern Shape qhpi_tensor_shape(const void *);
extern Quantization qhpi_tensor_quant_parameters(const void *);
extern void *qhpi_tensor_raw_data(const void *);

static uint32_t scale(void *runtime, uint32_t n_out, void **out, uint32_t n_in, const void *const *in) {
  Shape shape = qhpi_tensor_shape(in[0]);
  Quantization from = qhpi_tensor_quant_parameters(in[0]);
  Quantization to = qhpi_tensor_quant_parameters(out[0]);
  const uint16_t *x = qhpi_tensor_raw_data(in[0]);
  uint16_t *y = qhpi_tensor_raw_data(out[0]);
  size_t count = 1;
  for (uint32_t i = 0; i < shape.rank; i++) count *= shape.dims[i];
  for (size_t i = 0; i < count; i++) {
    float real = FACTOR * ((int32_t)x[i] - from.zero) * from.step + OFFSET;
    float stored = real / to.step + to.zero + 0.5f;
    y[i] = stored < 0 ? 0 : stored > 65535 ? 65535 : (uint16_t)stored;
  }
  return 0;
}

static const Signature SIGNATURE = {QUINT16, FLAT_4, DIRECT, DDR_OR_TCM};
static const Kernel KERNEL = {PACKAGE "::scale", scale, HVX, 1, &SIGNATURE, 1, &SIGNATURE};
static const Operation OPERATION = {PACKAGE "::Scale", 1, &KERNEL};
static const char *NAMES[] = {"Scale"};
static const Version OPSET = {1, 0, 0};
static const ApiVersion API = {{2, 40, 0}, {5, 51, 0}};
static const Info INFO = {PACKAGE, NAMES, NULL, 1, NULL, 0, "v2.51.0", &API, NULL, &OPSET};

static Error init(void *infrastructure) { return 0; }
static Error terminate(void) { return 0; }
static Error get_info(const Info **info) { *info = &INFO; return 0; }
static Error validate() { return 0; }
static Error create(void *graph, void *node, void **made) { *made = NULL; return 0; }
static Error release(void *made) { return 0; }
static Error log_initialize(void *callback, int level) { return 0; }
static Error log_set_level(int level) { return 0; }
static Error log_terminate(void) { return 0; }

Error ScaleProvider(Interface *interface) {
  *interface = (Interface){{1, 4, 0}, init, terminate, get_info, validate, create, release,
                           log_initialize, log_set_level, log_terminate};
  return 0;
}

// The backend calls this when it loads the package, and learns the package's name from it.
const char *qhpi_init(void) {
  qhpi_register_ops_v1(1, &OPERATION, PACKAGE);
  return PACKAGE;
}
