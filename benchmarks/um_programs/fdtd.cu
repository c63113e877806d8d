/* One step of finite differences in a volume: each point and its neighbours along the three axes. */

enum { RADIUS = 4 };

/* The volume has RADIUS more points on each side, which stay as they are. */
extern "C" __global__ void
finite_differences(float *to, const float *from, const float *factors, int depth, int height,
                   int width)
{
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    int z = (int)(blockIdx.z * blockDim.z + threadIdx.z);
    if (x >= width || y >= height || z >= depth)
        return;
    int row = width + 2 * RADIUS, plane = row * (height + 2 * RADIUS);
    int i = (z + RADIUS) * plane + (y + RADIUS) * row + x + RADIUS;
    float sum = factors[0] * from[i];
    for (int k = 1; k <= RADIUS; k++)
        sum += factors[k]
               * (from[i - k] + from[i + k] + from[i - k * row] + from[i + k * row]
                  + from[i - k * plane] + from[i + k * plane]);
    to[i] = sum;
}
