! dppo for solvers in Fortran: a module over dppo.h. Compile it with dppo.h beside it:
!
!   cc -c -x c -DDPPO_IMPLEMENTATION dppo.h -o dppo.o
!   gfortran -o solver dppo_module.f90 solver.f90 dppo.o
!
! With MPI, call dppo_open_all and dppo_step_all on all ranks, with a communicator such as MPI_COMM_WORLD of `use mpi`
! (of `use mpi_f08`, MPI_COMM_WORLD%mpi_val): rank 0 talks, and the others get the reply, the action, the seed and the
! path. Compile it so:
!
!   mpicc -c -x c -include mpi.h -DDPPO_IMPLEMENTATION dppo.h -o dppo.o
!   mpif90 -o solver dppo_module.f90 solver.f90 dppo.o
module dppo
  use, intrinsic :: iso_c_binding, only: c_int, c_long_long, c_double, c_char, c_ptr, c_null_char, c_loc, &
    c_f_pointer
  implicit none
  private
  public :: dppo_open, dppo_step, dppo_open_all, dppo_step_all, dppo_seed, dppo_path, dppo_info, dppo_close
  integer, parameter, public :: DPPO_STOP = 0, DPPO_ACT = 1, DPPO_RESET = 2, DPPO_SAVE = 3, DPPO_LOAD = 4
  integer, parameter, public :: DPPO_RUNNING = 0, DPPO_TERMINATED = 1, DPPO_TRUNCATED = 2

  interface
    function c_open(number_bytes, observation, action) bind(c, name="dppo_open")
      import :: c_ptr, c_int, c_char
      integer(c_int), value :: number_bytes
      character(kind=c_char), intent(in) :: observation(*), action(*)
      type(c_ptr) :: c_open
    end function
    function c_step(d, observation, reward, end, action) bind(c, name="dppo_step")
      import :: c_ptr, c_int, c_double
      type(c_ptr), value :: d, observation, action
      real(c_double), value :: reward
      integer(c_int), value :: end
      integer(c_int) :: c_step
    end function
    function c_open_all(number_bytes, observation, action, ranks) bind(c, name="dppo_open_all_fortran")
      import :: c_ptr, c_int, c_char
      integer(c_int), value :: number_bytes, ranks
      character(kind=c_char), intent(in) :: observation(*), action(*)
      type(c_ptr) :: c_open_all
    end function
    function c_step_all(d, observation, reward, end, action, ranks) bind(c, name="dppo_step_all_fortran")
      import :: c_ptr, c_int, c_double
      type(c_ptr), value :: d, observation, action
      real(c_double), value :: reward
      integer(c_int), value :: end, ranks
      integer(c_int) :: c_step_all
    end function
    function c_seed(d) bind(c, name="dppo_seed")
      import :: c_ptr, c_long_long
      type(c_ptr), value :: d
      integer(c_long_long) :: c_seed
    end function
    function c_path(d) bind(c, name="dppo_path")
      import :: c_ptr
      type(c_ptr), value :: d
      type(c_ptr) :: c_path
    end function
    subroutine c_info(d, name, number) bind(c, name="dppo_info")
      import :: c_ptr, c_char, c_double
      type(c_ptr), value :: d
      character(kind=c_char), intent(in) :: name(*)
      real(c_double), value :: number
    end subroutine
    subroutine dppo_close(d) bind(c, name="dppo_close")
      import :: c_ptr
      type(c_ptr), value :: d
    end subroutine
  end interface

contains

  ! Connect to dppo. All numbers are of double precision; shapes in `observation` and `action` are in C order.
  ! `restarts`: the solver handles DPPO_SAVE and DPPO_LOAD.
  function dppo_open(observation, action, restarts) result(d)
    character(*), intent(in) :: observation, action
    logical, intent(in), optional :: restarts
    type(c_ptr) :: d
    d = c_open(type_of(restarts), trim(observation)//c_null_char, trim(action)//c_null_char)
  end function

  ! The same on all ranks of a communicator, of which rank 0 connects.
  function dppo_open_all(observation, action, ranks, restarts) result(d)
    character(*), intent(in) :: observation, action
    integer, intent(in) :: ranks
    logical, intent(in), optional :: restarts
    type(c_ptr) :: d
    d = c_open_all(type_of(restarts), trim(observation)//c_null_char, trim(action)//c_null_char, int(ranks, c_int))
  end function

  function type_of(restarts) result(number_bytes)
    logical, intent(in), optional :: restarts
    integer(c_int) :: number_bytes
    number_bytes = 8
    if (present(restarts)) number_bytes = merge(24, 8, restarts)
  end function

  function dppo_step(d, observation, reward, end, action) result(reply)
    type(c_ptr), intent(in) :: d
    real(c_double), intent(in), contiguous, target :: observation(:)
    real(c_double), intent(in) :: reward
    integer, intent(in) :: end
    real(c_double), intent(inout), contiguous, target :: action(:)
    integer :: reply
    reply = c_step(d, c_loc(observation), reward, int(end, c_int), c_loc(action))
  end function

  ! Observation, reward and end are those of rank 0.
  function dppo_step_all(d, observation, reward, end, action, ranks) result(reply)
    type(c_ptr), intent(in) :: d
    real(c_double), intent(in), contiguous, target :: observation(:)
    real(c_double), intent(in) :: reward
    integer, intent(in) :: end, ranks
    real(c_double), intent(inout), contiguous, target :: action(:)
    integer :: reply
    reply = c_step_all(d, c_loc(observation), reward, int(end, c_int), c_loc(action), int(ranks, c_int))
  end function

  function dppo_seed(d) result(seed)
    type(c_ptr), intent(in) :: d
    integer(c_long_long) :: seed
    seed = c_seed(d)
  end function

  function dppo_path(d) result(path)
    type(c_ptr), intent(in) :: d
    character(:), allocatable :: path
    character(kind=c_char), pointer :: text(:)
    integer :: length, i
    call c_f_pointer(c_path(d), text, [65536])
    length = 0
    do while (text(length + 1) /= c_null_char)
      length = length + 1
    end do
    allocate(character(length) :: path)
    do i = 1, length
      path(i:i) = text(i)
    end do
  end function

  subroutine dppo_info(d, name, number)
    type(c_ptr), intent(in) :: d
    character(*), intent(in) :: name
    real(c_double), intent(in) :: number
    call c_info(d, trim(name)//c_null_char, number)
  end subroutine
end module
