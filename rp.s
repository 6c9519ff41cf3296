00000000000026e0 <_ZN7leanopt10real_powerEdd>:
    26e0:	ucomisd 0x990(%rip),%xmm0        # 3078 <_IO_stdin_used+0x78>
    26e8:	mov    $0x0,%edx
    26ed:	setnp  %al
    26f0:	cmovne %edx,%eax
    26f3:	test   %al,%al
    26f5:	jne    29c0 <_ZN7leanopt10real_powerEdd+0x2e0>
    26fb:	push   %rbx
    26fc:	pxor   %xmm7,%xmm7
    2700:	sub    $0x30,%rsp
    2704:	ucomisd %xmm7,%xmm1
    2708:	movsd  %xmm1,(%rsp)
    270d:	setnp  %dl
    2710:	cmove  %edx,%eax
    2713:	test   %al,%al
    2715:	jne    2998 <_ZN7leanopt10real_powerEdd+0x2b8>
    271b:	call   1900 <_ZN7leanopt6detail9logarithmEd>
    2720:	movsd  (%rsp),%xmm4
    2725:	movapd %xmm0,%xmm5
    2729:	movapd %xmm4,%xmm3
    272d:	mulsd  %xmm0,%xmm3
    2731:	comisd 0xa5f(%rip),%xmm3        # 3198 <_IO_stdin_used+0x198>
    2739:	jbe    2970 <_ZN7leanopt10real_powerEdd+0x290>
    273f:	movsd  0xa59(%rip),%xmm0        # 31a0 <_IO_stdin_used+0x1a0>
    2747:	comisd %xmm3,%xmm0
    274b:	jbe    2970 <_ZN7leanopt10real_powerEdd+0x290>
    2751:	movapd %xmm3,%xmm2
    2755:	movsd  %xmm1,0x18(%rsp)
    275b:	movapd %xmm4,%xmm0
    275f:	movq   0xac8(%rip),%xmm8        # 3230 <_IO_stdin_used+0x230>
    2768:	movapd %xmm5,%xmm1
    276c:	movsd  %xmm3,0x10(%rsp)
    2772:	xorpd  %xmm8,%xmm2
    2777:	movsd  %xmm5,0x8(%rsp)
    277d:	movsd  %xmm4,(%rsp)
    2782:	call   1050 <fma@plt>
    2787:	movsd  (%rsp),%xmm4
    278c:	movsd  0x18(%rsp),%xmm6
    2792:	pxor   %xmm7,%xmm7
    2796:	movsd  0x8(%rsp),%xmm5
    279c:	movsd  0x10(%rsp),%xmm3
    27a2:	mulsd  %xmm6,%xmm4
    27a6:	movsd  0x9fa(%rip),%xmm1        # 31a8 <_IO_stdin_used+0x1a8>
    27ae:	movq   0xa79(%rip),%xmm8        # 3230 <_IO_stdin_used+0x230>
    27b7:	mulsd  %xmm7,%xmm5
    27bb:	comisd %xmm3,%xmm7
    27bf:	addsd  %xmm5,%xmm4
    27c3:	movapd %xmm3,%xmm5
    27c7:	addsd  %xmm0,%xmm4
    27cb:	addsd  %xmm4,%xmm5
    27cf:	mulsd  %xmm5,%xmm1
    27d3:	movapd %xmm5,%xmm0
    27d7:	subsd  %xmm3,%xmm0
    27db:	subsd  %xmm0,%xmm4
    27df:	movsd  0x9a1(%rip),%xmm0        # 3188 <_IO_stdin_used+0x188>
    27e7:	movsd  %xmm4,(%rsp)
    27ec:	ja     27f6 <_ZN7leanopt10real_powerEdd+0x116>
    27ee:	movsd  0x98a(%rip),%xmm0        # 3180 <_IO_stdin_used+0x180>
    27f6:	addsd  %xmm1,%xmm0
    27fa:	pxor   %xmm3,%xmm3
    27fe:	movsd  %xmm5,0x18(%rsp)
    2804:	movsd  0x904(%rip),%xmm1        # 3110 <_IO_stdin_used+0x110>
    280c:	cvttsd2si %xmm0,%rbx
    2811:	mov    %rbx,%rax
    2814:	neg    %rax
    2817:	cvtsi2sd %rax,%xmm3
    281c:	movapd %xmm3,%xmm6
    2820:	movapd %xmm3,%xmm0
    2824:	movsd  %xmm3,0x8(%rsp)
    282a:	mulsd  %xmm1,%xmm6
    282e:	xorpd  %xmm6,%xmm8
    2833:	movsd  %xmm6,0x10(%rsp)
    2839:	movapd %xmm8,%xmm2
    283e:	call   1050 <fma@plt>
    2843:	movsd  0x8(%rsp),%xmm3
    2849:	pxor   %xmm4,%xmm4
    284d:	movsd  0x10(%rsp),%xmm6
    2853:	mulsd  0x8bd(%rip),%xmm3        # 3118 <_IO_stdin_used+0x118>
    285b:	movsd  0x18(%rsp),%xmm5
    2861:	lea    0x20(%rsp),%rdi
    2866:	movapd %xmm6,%xmm1
    286a:	movapd %xmm5,%xmm2
    286e:	addsd  %xmm4,%xmm3
    2872:	addsd  %xmm0,%xmm3
    2876:	addsd  %xmm3,%xmm1
    287a:	addsd  %xmm1,%xmm2
    287e:	movapd %xmm2,%xmm7
    2882:	movapd %xmm2,%xmm8
    2887:	subsd  %xmm5,%xmm7
    288b:	subsd  %xmm7,%xmm8
    2890:	subsd  %xmm8,%xmm5
    2895:	movapd %xmm5,%xmm0
    2899:	movapd %xmm1,%xmm5
    289d:	subsd  %xmm6,%xmm1
    28a1:	subsd  %xmm7,%xmm5
    28a5:	subsd  %xmm1,%xmm3
    28a9:	addsd  (%rsp),%xmm3
    28ae:	movapd %xmm2,%xmm1
    28b2:	addsd  %xmm5,%xmm0
    28b6:	addsd  %xmm3,%xmm0
    28ba:	addsd  %xmm0,%xmm1
    28be:	movsd  %xmm1,0x20(%rsp)
    28c4:	subsd  %xmm2,%xmm1
    28c8:	subsd  %xmm1,%xmm0
    28cc:	movsd  %xmm0,0x28(%rsp)
    28d2:	call   20c0 <_ZN7leanopt6detail20exponential_less_oneERKNS0_7twofoldE>
    28d7:	movsd  0x799(%rip),%xmm5        # 3078 <_IO_stdin_used+0x78>
    28df:	pxor   %xmm4,%xmm4
    28e3:	mov    %rbx,%rax
    28e6:	movapd %xmm0,%xmm2
    28ea:	addsd  %xmm4,%xmm1
    28ee:	shr    $0x3f,%rax
    28f2:	mov    $0x3ff,%edx
    28f7:	addsd  %xmm0,%xmm5
    28fb:	movsd  0x775(%rip),%xmm0        # 3078 <_IO_stdin_used+0x78>
    2903:	add    %rbx,%rax
    2906:	sar    %rax
    2909:	neg    %rax
    290c:	movapd %xmm5,%xmm3
    2910:	subsd  0x760(%rip),%xmm3        # 3078 <_IO_stdin_used+0x78>
    2918:	movapd %xmm5,%xmm6
    291c:	sub    %rax,%rdx
    291f:	shl    $0x34,%rdx
    2923:	lea    0x3ff(%rbx,%rax,1),%rax
    292b:	shl    $0x34,%rax
    292f:	subsd  %xmm3,%xmm6
    2933:	subsd  %xmm3,%xmm2
    2937:	subsd  %xmm6,%xmm0
    293b:	addsd  %xmm2,%xmm0
    293f:	movq   %rdx,%xmm2
    2944:	movapd %xmm0,%xmm3
    2948:	addsd  %xmm1,%xmm3
    294c:	addsd  %xmm5,%xmm3
    2950:	mulsd  %xmm2,%xmm3
    2954:	movq   %rax,%xmm2
    2959:	mulsd  %xmm2,%xmm3
    295d:	add    $0x30,%rsp
    2961:	movapd %xmm3,%xmm0
    2965:	pop    %rbx
    2966:	ret
    2967:	nopw   0x0(%rax,%rax,1)
    2970:	pxor   %xmm0,%xmm0
    2974:	comisd %xmm3,%xmm0
    2978:	ja     29b0 <_ZN7leanopt10real_powerEdd+0x2d0>
    297a:	comisd %xmm0,%xmm3
    297e:	jbe    295d <_ZN7leanopt10real_powerEdd+0x27d>
    2980:	movsd  0x808(%rip),%xmm3        # 3190 <_IO_stdin_used+0x190>
    2988:	add    $0x30,%rsp
    298c:	pop    %rbx
    298d:	movapd %xmm3,%xmm0
    2991:	ret
    2992:	nopw   0x0(%rax,%rax,1)
    2998:	mov    0x6d9(%rip),%rax        # 3078 <_IO_stdin_used+0x78>
    299f:	add    $0x30,%rsp
    29a3:	pop    %rbx
    29a4:	movq   %rax,%xmm3
    29a9:	movapd %xmm3,%xmm0
    29ad:	ret
    29ae:	xchg   %ax,%ax
    29b0:	pxor   %xmm3,%xmm3
    29b4:	add    $0x30,%rsp
    29b8:	movapd %xmm3,%xmm0
    29bc:	pop    %rbx
    29bd:	ret
    29be:	xchg   %ax,%ax
    29c0:	mov    0x6b1(%rip),%rax        # 3078 <_IO_stdin_used+0x78>
    29c7:	movq   %rax,%xmm3
    29cc:	movapd %xmm3,%xmm0
    29d0:	ret
    29d1:	cs nopw 0x0(%rax,%rax,1)
    29db:	nopl   0x0(%rax,%rax,1)

