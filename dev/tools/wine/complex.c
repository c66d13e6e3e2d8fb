/* C99's complex functions, which Wine 8's C runtime lacks. Windows passes such numbers as structs,
   and its long double is a double. */
#include <complex.h>

typedef struct { double part[2]; } Double;
typedef struct { float part[2]; } Float;

static double complex number(Double z)
{
  double complex joined;
  ((double *)&joined)[0] = z.part[0];
  ((double *)&joined)[1] = z.part[1];
  return joined;
}
static Double parts(double complex z) { return (Double){{creal(z), cimag(z)}}; }
static Double wide(Float z) { return (Double){{z.part[0], z.part[1]}}; }
static Float narrow(Double z) { return (Float){{(float)z.part[0], (float)z.part[1]}}; }

#define REAL(name) \
  double our_##name(Double z) { return name(number(z)); } \
  float our_##name##f(Float z) { return (float)our_##name(wide(z)); }
#define SAME(name) \
  Double our_##name(Double z) { return parts(name(number(z))); } \
  Float our_##name##f(Float z) { return narrow(our_##name(wide(z))); }
#define POWER(name) \
  Double our_##name(Double x, Double y) { return parts(name(number(x), number(y))); } \
  Float our_##name##f(Float x, Float y) { return narrow(our_##name(wide(x), wide(y))); }

REAL(cabs)
REAL(carg)
REAL(cimag)
REAL(creal)
SAME(cacos)
SAME(cacosh)
SAME(casin)
SAME(casinh)
SAME(catan)
SAME(catanh)
SAME(ccos)
SAME(ccosh)
SAME(cexp)
SAME(clog)
SAME(conj)
SAME(csin)
SAME(csinh)
SAME(csqrt)
SAME(ctan)
SAME(ctanh)
POWER(cpow)
