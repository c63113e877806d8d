/* The prices of European options by the formula of Black and Scholes, one option for each thread. */

extern "C" __global__ void
black_scholes(const float *stock, const float *strike, const float *years, float *call, float *put,
              float rate, float volatility, int count)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count)
        return;
    float deviation = volatility * sqrtf(years[i]);
    float drift = (rate + 0.5f * volatility * volatility) * years[i];
    float above = (logf(stock[i] / strike[i]) + drift) / deviation;
    float below = above - deviation;
    float due = strike[i] * expf(-rate * years[i]);
    call[i] = stock[i] * normcdff(above) - due * normcdff(below);
    put[i] = due * normcdff(-below) - stock[i] * normcdff(-above);
}
