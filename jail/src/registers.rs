//! Architecture-specific parts: registers, and the few instructions of a `program`.
//!
//! The state of a stopped process is its general registers. To make it execute a system call, the
//! call's number and arguments are written to the registers of the calling convention, and the
//! instruction pointer is set to an instruction that enters the kernel.

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;

/// The general registers, in the kernel's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registers([u64; COUNT]);

/// Size of the general registers in bytes.
pub(crate) const SIZE: usize = COUNT * 8;

impl Registers {
    pub(crate) fn from_bytes(bytes: &[u8; SIZE]) -> Registers {
        let mut values = [0; COUNT];
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(8)) {
            *value = u64::from_ne_bytes(bytes.try_into().expect("chunks have eight bytes"));
        }
        Registers(values)
    }

    pub(crate) fn to_bytes(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        for (place, value) in bytes.chunks_exact_mut(8).zip(self.0) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
        bytes
    }

    /// Returns the same registers with another instruction pointer, outside any system call.
    pub(crate) fn at(mut self, address: u64) -> Registers {
        self.0[INSTRUCTION_POINTER] = address;
        self.outside_calls()
    }

    /// Returns the same registers, returning from the system call that they were entering, with
    /// this result.
    pub(crate) fn returning(mut self, result: u64) -> Registers {
        self.0[RESULT] = result;
        self.outside_calls()
    }

    /// Returns registers that make a system call at `address`, which must hold an instruction that
    /// enters the kernel.
    pub(crate) fn calling(mut self, address: u64, number: u64, arguments: [u64; 6]) -> Registers {
        self.0[SYSCALL_NUMBER] = number;
        for (register, argument) in ARGUMENTS.into_iter().zip(arguments) {
            self.0[register] = argument;
        }
        self.at(address)
    }

    pub(crate) fn instruction(self) -> u64 {
        self.0[INSTRUCTION_POINTER]
    }

    /// Returns the result of a system call that just ended.
    pub(crate) fn result(self) -> i64 {
        self.0[RESULT].cast_signed()
    }
}

/// An argument of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Argument {
    Value(u64),
    /// The result of an earlier step, at this byte offset in the table of results.
    Earlier(u32),
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::{Argument, Registers};

    // Indices of `struct user_regs_struct`.
    const R10: usize = 7;
    const R9: usize = 8;
    const R8: usize = 9;
    const RAX: usize = 10;
    const RDX: usize = 12;
    const RSI: usize = 13;
    const RDI: usize = 14;
    const ORIG_RAX: usize = 15;
    const RIP: usize = 16;

    pub(crate) const COUNT: usize = 27;
    pub(super) const INSTRUCTION_POINTER: usize = RIP;
    pub(super) const RESULT: usize = RAX;
    /// A program puts the number of the call into the register that later holds its result.
    pub(super) const SYSCALL_NUMBER: usize = RESULT;
    pub(super) const ARGUMENTS: [usize; 6] = [RDI, RSI, RDX, R10, R8, R9];
    /// Index of the argument of `clone` that is the address of the new thread's id.
    pub(crate) const CLONE_CHILD_TID: usize = 3;
    /// Length of the instruction that enters the kernel.
    pub(crate) const SYSCALL_LENGTH: u64 = 2;
    /// Number of bytes by which a trap advances the instruction pointer.
    pub(crate) const TRAP_ADVANCE: u64 = 1;
    /// From `linux/elf.h`.
    const NT_X86_XSTATE: i32 = 0x202;
    /// The register set with all other state of a computation (XSAVE).
    pub(crate) const EXTENDED_SET: i32 = NT_X86_XSTATE;

    impl Registers {
        /// Without this the kernel might treat the registers as those of an interrupted call and
        /// restart it.
        pub(super) fn outside_calls(mut self) -> Registers {
            self.0[ORIG_RAX] = u64::MAX;
            self
        }
    }

    /// Replaces the system call that a process is about to enter with another one, which has no
    /// arguments.
    pub(crate) fn replace_syscall(
        process: rustix::process::Pid,
        entering: Registers,
        number: u64,
    ) -> std::io::Result<()> {
        let mut replaced = entering;
        replaced.0[ORIG_RAX] = number;
        crate::sys::write_registers(process, libc::NT_PRSTATUS, &replaced.to_bytes())
    }

    /// Loads the address of the table of results into r12, which system calls preserve.
    pub(crate) fn begin(code: &mut Vec<u8>, results: u64) {
        code.extend([0x49, 0xbc]);
        code.extend(results.to_le_bytes());
    }

    /// Emits one system call; its result is stored in the table. A failure runs into a trap.
    pub(crate) fn call(code: &mut Vec<u8>, number: u64, arguments: &[Argument; 6], result: u32) {
        /// rdi, rsi, rdx, r10, r8, r9: the instructions that load each from a number, and from the
        /// table.
        const LOADS: [([u8; 2], [u8; 4]); 6] = [
            ([0x48, 0xbf], [0x49, 0x8b, 0xbc, 0x24]),
            ([0x48, 0xbe], [0x49, 0x8b, 0xb4, 0x24]),
            ([0x48, 0xba], [0x49, 0x8b, 0x94, 0x24]),
            ([0x49, 0xba], [0x4d, 0x8b, 0x94, 0x24]),
            ([0x49, 0xb8], [0x4d, 0x8b, 0x84, 0x24]),
            ([0x49, 0xb9], [0x4d, 0x8b, 0x8c, 0x24]),
        ];
        for (argument, (with_number, from_table)) in arguments.iter().zip(LOADS) {
            match argument {
                Argument::Value(value) => {
                    code.extend(with_number);
                    code.extend(value.to_le_bytes());
                }
                Argument::Earlier(offset) => {
                    code.extend(from_table);
                    code.extend(offset.to_le_bytes());
                }
            }
        }
        code.extend([0x48, 0xb8]);
        code.extend(number.to_le_bytes());
        code.extend([0x0f, 0x05]);
        code.extend([0x49, 0x89, 0x84, 0x24]);
        code.extend(result.to_le_bytes());
        // test rax, rax; jns over the trap
        code.extend([0x48, 0x85, 0xc0, 0x79, 0x01]);
        trap(code);
    }

    pub(crate) fn trap(code: &mut Vec<u8>) {
        code.push(0xcc);
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::{Argument, Registers};

    // Index of `struct user_pt_regs`, in which x0 to x30 come first.
    const PC: usize = 32;

    pub(crate) const COUNT: usize = 34;
    pub(super) const INSTRUCTION_POINTER: usize = PC;
    pub(super) const RESULT: usize = 0;
    pub(super) const SYSCALL_NUMBER: usize = 8;
    pub(super) const ARGUMENTS: [usize; 6] = [0, 1, 2, 3, 4, 5];
    pub(crate) const CLONE_CHILD_TID: usize = 4;
    pub(crate) const SYSCALL_LENGTH: u64 = 4;
    pub(crate) const TRAP_ADVANCE: u64 = 0;
    /// The register set of the floating-point registers.
    pub(crate) const EXTENDED_SET: i32 = libc::NT_PRFPREG;
    /// The register set with the number of the call being entered. From `linux/elf.h`.
    const NT_ARM_SYSTEM_CALL: i32 = 0x404;
    /// The table of results is in x19, which system calls preserve.
    const RESULTS_REGISTER: u32 = 19;

    impl Registers {
        pub(super) fn outside_calls(self) -> Registers {
            self
        }
    }

    /// Replaces the system call that a process is about to enter with another one, which has no
    /// arguments.
    pub(crate) fn replace_syscall(
        process: rustix::process::Pid,
        _entering: Registers,
        number: u64,
    ) -> std::io::Result<()> {
        crate::sys::write_registers(process, NT_ARM_SYSTEM_CALL, &(number as i32).to_ne_bytes())
    }

    fn load(code: &mut Vec<u8>, register: u32, value: u64) {
        // movz, then movk for the upper three quarters.
        for (quarter, base) in [0xd280_0000_u32, 0xf2a0_0000, 0xf2c0_0000, 0xf2e0_0000]
            .into_iter()
            .enumerate()
        {
            let part = (value >> (16 * quarter)) as u32 & 0xffff;
            code.extend((base | part << 5 | register).to_le_bytes());
        }
    }

    pub(crate) fn begin(code: &mut Vec<u8>, results: u64) {
        load(code, RESULTS_REGISTER, results);
    }

    pub(crate) fn call(code: &mut Vec<u8>, number: u64, arguments: &[Argument; 6], result: u32) {
        for (register, argument) in (0..).zip(arguments) {
            match argument {
                Argument::Value(value) => load(code, register, *value),
                // ldr from the table
                Argument::Earlier(offset) => {
                    code.extend(
                        (0xf940_0000 | (offset / 8) << 10 | RESULTS_REGISTER << 5 | register)
                            .to_le_bytes(),
                    );
                }
            }
        }
        load(code, 8, number);
        // svc 0; str to the table
        code.extend(0xd400_0001_u32.to_le_bytes());
        code.extend((0xf900_0000 | (result / 8) << 10 | RESULTS_REGISTER << 5).to_le_bytes());
        // tbz x0, 63: over the trap
        code.extend((0xb6f8_0000_u32 | 2 << 5).to_le_bytes());
        trap(code);
    }

    pub(crate) fn trap(code: &mut Vec<u8>) {
        code.extend(0xd420_0000_u32.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered() -> Registers {
        let mut values = [0; COUNT];
        for (value, number) in values.iter_mut().zip(0x1000_0000_0001_u64..) {
            *value = number;
        }
        Registers(values)
    }

    #[test]
    fn registers_are_the_same_after_conversion_to_bytes_and_back() {
        let registers = numbered();
        assert_eq!(Registers::from_bytes(&registers.to_bytes()), registers);
        assert_eq!(registers.to_bytes().len(), SIZE);
        // Control: a different value gives a different set.
        assert_ne!(
            Registers::from_bytes(&registers.at(7).to_bytes()),
            registers
        );
    }

    #[test]
    fn a_call_has_its_number_its_arguments_and_its_place() {
        let calling = numbered().calling(0xabc, 42, [1, 2, 3, 4, 5, 6]);
        assert_eq!(calling.instruction(), 0xabc);
        assert_eq!(
            ARGUMENTS.map(|register| calling.0[register]),
            [1, 2, 3, 4, 5, 6]
        );
        assert_eq!(calling.0[SYSCALL_NUMBER], 42);
        // Unrelated registers are unchanged, such as the stack pointer.
        let changed = calling
            .0
            .iter()
            .zip(numbered().0)
            .filter(|(now, before)| **now != *before)
            .count();
        let expected = if cfg!(target_arch = "x86_64") { 9 } else { 8 };
        assert_eq!(
            changed, expected,
            "number, six arguments, place, and on some processors the mark of a call"
        );
    }

    #[test]
    fn a_return_changes_the_result_alone() {
        let returning = numbered().returning(u64::MAX);
        assert_eq!(returning.result(), -1);
        assert_eq!(returning.instruction(), numbered().instruction());
    }
}
