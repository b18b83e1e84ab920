! The heated bar of heat.c in Fortran, on one core.
!
!   include="$(python -m dppo.remote)"
!   cc -c -x c -DDPPO_IMPLEMENTATION "$include/dppo.h" -o dppo.o
!   gfortran -O2 -o heat_fortran "$include/dppo_module.f90" heat.f90 dppo.o
program heat
  use dppo
  use, intrinsic :: iso_c_binding, only: c_ptr
  implicit none
  integer, parameter :: cells = 48, heaters = 3, substeps = 20, intervals = 100
  real(8), parameter :: diffusion = 0.4d0, pi = acos(-1.0d0)
  real(8) :: now(0:cells + 1), wanted(cells), power(heaters), reward
  integer :: interval, substep, cell, end
  integer :: heater(cells) ! of each cell
  type(c_ptr) :: d

  do cell = 1, cells
    heater(cell) = 1 + (cell - 1)/(cells/heaters)
  end do
  wanted = [(1 + 0.5d0*sin(pi*(cell - 1)/(cells - 1)), cell=1, cells)]
  now = 0
  reward = 0
  interval = 0
  d = dppo_open("temperature[48]", "power[3](0:1)")
  do
    end = merge(DPPO_TRUNCATED, DPPO_RUNNING, interval == intervals)
    select case (dppo_step(d, now(1:cells), reward, end, power))
    case (DPPO_STOP)
      exit
    case (DPPO_RESET)
      now = 0.5d0*modulo(dppo_seed(d), 1000)/1000
      interval = 0
    case (DPPO_ACT)
      do substep = 1, substeps
        now(0) = 0 ! the ends of the bar are cold
        now(cells + 1) = 0
        now(1:cells) = now(1:cells) + diffusion*(now(0:cells - 1) - 2*now(1:cells) + now(2:cells + 1)) &
                       + 0.02d0*power(heater)
      end do
      reward = -sum((now(1:cells) - wanted)**2)/cells
      interval = interval + 1
    end select
  end do
  call dppo_close(d)
end program
