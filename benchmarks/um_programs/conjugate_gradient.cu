/* The steps of conjugate gradient: a sparse matrix by rows times a vector, and sums of vectors. */

/* y = A x; the entries of row i are those from first[i] to first[i + 1]. */
extern "C" __global__ void
multiply(const int *first, const int *columns, const float *values, const float *x, float *y,
         int rows)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= rows)
        return;
    float sum = 0.0f;
    for (int k = first[i]; k < first[i + 1]; k++)
        sum += values[k] * x[columns[k]];
    y[i] = sum;
}

/* y += a x */
extern "C" __global__ void
add_multiple(float a, const float *x, float *y, int count)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count)
        y[i] += a * x[i];
}

/* y = x + b y */
extern "C" __global__ void
multiply_and_add(float b, const float *x, float *y, int count)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count)
        y[i] = x[i] + b * y[i];
}
