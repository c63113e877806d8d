/* Padding, and a product of spectra, for a convolution by Fourier transforms. */

/* The kernel's centre comes to (0, 0) of an array of zeros, and wraps around at its borders. */
extern "C" __global__ void
pad_kernel(const float *kernel, float *padded, int height, int width, int centre_y, int centre_x,
           int padded_height, int padded_width)
{
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    if (x >= width || y >= height)
        return;
    int to_y = (y - centre_y + padded_height) % padded_height;
    int to_x = (x - centre_x + padded_width) % padded_width;
    padded[to_y * padded_width + to_x] = kernel[y * width + x];
}

/* The index in the data for a padded index. The first `after` indices beyond the end stand for the
 * last one; the others, which are negative indices wrapped around, for the first one. */
static __device__ int
clamped(int index, int size, int after)
{
    return index < size ? index : index < size + after ? size - 1 : 0;
}

extern "C" __global__ void
pad_data(const float *data, float *padded, int height, int width, int after_y, int after_x,
         int padded_height, int padded_width)
{
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    if (x >= padded_width || y >= padded_height)
        return;
    int from = clamped(y, height, after_y) * width + clamped(x, width, after_x);
    padded[y * padded_width + x] = data[from];
}

/* Complex numbers: real part, imaginary part. */
extern "C" __global__ void
multiply_spectra(float *data, const float *kernel, float factor, int count)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count)
        return;
    float a = data[2 * i], b = data[2 * i + 1], c = kernel[2 * i], d = kernel[2 * i + 1];
    data[2 * i] = factor * (a * c - b * d);
    data[2 * i + 1] = factor * (a * d + b * c);
}
