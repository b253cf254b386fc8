# The machine code of cellblock_runner/threads.py, for Linux on x86-64.
#
#   as --64 -o threads.o threads.s && objcopy -O binary -j .text threads.o threads.bin
#
# It is mapped at the beginning of a page; the table follows at the next page. Apart from that, it
# only uses the stack of the thread. No register needs to be preserved: the kernel has saved them.

        .set TABLE, 4096
        .set CLAIMED, 0                 # number of slots that were claimed
        .set READY, 4                   # number of slots that are filled
        .set ROUND, 8                   # threads wait until this changes
        .set ACTIVE, 12                 # 0: threads must not wait
        .set SLOTS, 64
        .set SLOT_COUNT, 1024           # of 32 bytes: context, thread pointer, thread id

        .text
start:

# handler(signal, information, context): records the context of the thread, and waits.
handler:
        mov     %rdx, %r8
        lea     start+TABLE(%rip), %r9
        mov     ROUND(%r9), %r12d
        cmpl    $0, ACTIVE(%r9)
        je      2f
        mov     $1, %r13d
        lock xadd %r13d, CLAIMED(%r9)
        cmp     $SLOT_COUNT, %r13d
        jae     1f
        shl     $5, %r13
        lea     SLOTS(%r9,%r13), %r13
        mov     %r8, (%r13)
        mov     %fs:0, %rax
        mov     %rax, 8(%r13)
        mov     $186, %eax              # gettid
        syscall
        mov     %rax, 16(%r13)
        lock incl READY(%r9)
        lea     READY(%r9), %rdi
        mov     $129, %esi              # FUTEX_WAKE, private
        mov     $1, %edx
        mov     $202, %eax              # futex
        syscall
1:      cmp     %r12d, ROUND(%r9)
        jne     2f
        lea     ROUND(%r9), %rdi
        mov     $128, %esi              # FUTEX_WAIT, private
        mov     %r12d, %edx
        xor     %r10d, %r10d
        mov     $202, %eax              # futex
        syscall
        jmp     1b
2:      ret

        .balign 16
# The return address of a handler.
restorer:
        mov     $15, %eax               # rt_sigreturn
        syscall

        .balign 16
# resume_in_copy(context, thread pointer, address of the thread id, robust list, rseq area): creates
# a thread that continues from that context. Returns its id.
resume_in_copy:
        push    %r12
        push    %r13
        mov     %rcx, %r12
        mov     %r8, %r13
        mov     %rsi, %r8
        mov     %rdi, %rsi
        mov     %rdx, %r10
        xor     %edx, %edx
        mov     $0x2d0f00, %edi         # the flags of a thread of the C library
        mov     $56, %eax               # clone
        syscall
        test    %rax, %rax
        jz      3f
        pop     %r13
        pop     %r12
        ret
3:      test    %r12, %r12
        jz      4f
        mov     %r12, %rdi
        mov     $24, %esi
        mov     $273, %eax              # set_robust_list
        syscall
4:      test    %r13, %r13
        jz      5f
        mov     %r13, %rdi
        mov     $32, %esi
        xor     %edx, %edx
        mov     $0x53053053, %r10d
        mov     $334, %eax              # rseq
        syscall
5:      mov     $15, %eax               # rt_sigreturn, with the context on top of the stack
        syscall
