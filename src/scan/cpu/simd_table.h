// Exports a struct of function pointers per instruction set and type. In a kernels_*.cpp, after HWY_AFTER_NAMESPACE and
// inside #if HWY_ONCE. In the HWY_NAMESPACE it needs `template <class T> const Table<T>* make_table()`, wrapped by
// FW_SIMD_MAKE for both types.
#pragma once

#define FW_SIMD_MAKE(Table)                                       \
  const Table<float>* Table##F32() { return &table_of<float>(); } \
  const Table<double>* Table##F64() { return &table_of<double>(); }

#define FW_SIMD_EXPORT(Table, accessor)                                           \
  HWY_EXPORT(Table##F32);                                                         \
  HWY_EXPORT(Table##F64);                                                         \
  template <>                                                                     \
  const Table<float>& accessor<float>() {                                         \
    static const Table<float>* const table = HWY_DYNAMIC_DISPATCH(Table##F32)();  \
    return *table;                                                                \
  }                                                                               \
  template <>                                                                     \
  const Table<double>& accessor<double>() {                                       \
    static const Table<double>* const table = HWY_DYNAMIC_DISPATCH(Table##F64)(); \
    return *table;                                                                \
  }
