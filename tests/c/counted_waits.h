/* counted_waits.h: counts the waits of the extension for conditions, so that a test knows that a
 * thread waits. run.sh links every test so that its calls of pthread_cond_wait come here. */
#ifndef COUNTED_WAITS_H
#define COUNTED_WAITS_H

/* How many waits have begun in this process. */
unsigned long waits_begun(void);

#endif
